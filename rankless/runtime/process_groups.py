"""Makes the process groups of a job: the default one, and those of the axes of its mesh.

The default one is in shared memory where all ranks are on one host, and hierarchical where hosts have several; else of
Gloo or NCCL. No other module makes process groups, except for a process that is alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as groups
from torch.distributed.device_mesh import init_device_mesh

from rankless.collectives.backends import register_backend
from rankless.collectives.backends.group_failure_errors import Membership
from rankless.collectives.backends.hosts.hosts_group import ONE_RANK_PER_HOST, HostsGroup, open_hosts_group
from rankless.collectives.backends.hosts.process_group import register_hierarchical_backend
from rankless.collectives.backends.shared_group import NO_MEMORY, SEVERAL_HOSTS, SharedGroup, open_shared_group
from rankless.collectives.byte_messages import all_gather_bytes
from rankless.config import environment
from rankless.config.run_config import Backend
from rankless.config.shared_memory_support import Support
from rankless.errors import JoinError
from rankless.parallel.mesh import AxisRole, Mesh, MeshAxis
from rankless.records.encoding import encode_msgpack
from rankless.records.parallel_plan import PlannedAxis
from rankless.runtime.hooks.init_process_group import find_original_init
from rankless.runtime.rendezvous.connect_to_run_store import STORE_TIMEOUT
from rankless.runtime.rendezvous.find_rendezvous import print_notice
from rankless.runtime.rendezvous.join_at_tcp_address import NOTICE_AFTER_SECONDS

JOINED_KEY = "rankless/joined"
"""The store's counter of the ranks that have made the group."""
CONFIRMED_KEY = "rankless/confirmed"
"""The store's counter of the ranks that know that all have made it."""


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """The default process group that all ranks of a job are to make."""

    store: Any
    """A `torch.distributed.Store` that all ranks share."""
    rank: int
    size: int
    timeout: timedelta = field(default_factory=lambda: groups.default_pg_timeout)
    """How long the ranks wait for each other in its collectives."""
    has_several_hosts: bool = False
    """Whether the launcher has started the ranks on several hosts. Default: it does not say."""
    must_be_abortable: bool = False
    """Whether a rank must be able to end the group for all, as one of Gloo cannot be."""


def make_world_group(
    backend: Backend,
    device: torch.device,
    *,
    store: Any,
    rank: int,
    world_size: int,
    must_be_abortable: bool = False,
) -> Callable[[], None]:
    """Make the process group of the world, and return the function that destroys it.

    Returns only after all ranks have made the group: a rank whose script ends at once would otherwise be gone while
    others still connect to it. Rank 0, whose process may serve the store, destroys the group only after all ranks know
    that. Raises JoinError if some ranks have not made the group within STORE_TIMEOUT.
    """
    if backend in ("shared_memory", "hierarchical"):
        request = GroupRequest(
            store=store,
            rank=rank,
            size=world_size,
            has_several_hosts=backend == "hierarchical",
            must_be_abortable=must_be_abortable,
        )
        init_cpu_group(request, notify=print_notice)
    else:
        bound = device if backend == "nccl" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=bound)
    store.add(JOINED_KEY, 1)
    joined = _wait_for_count(store, JOINED_KEY, world_size)
    if joined < world_size:
        raise JoinError(
            expected=f"all {world_size} ranks to make their process group within {STORE_TIMEOUT.total_seconds():g} s",
            found=f"{joined} that have",
            fix="read the logs of the other ranks: one hangs or has ended while it joins",
        )
    store.add(CONFIRMED_KEY, 1)

    def end() -> None:
        if rank == 0:
            _wait_for_count(store, CONFIRMED_KEY, world_size)
        dist.destroy_process_group()

    return end


def init_cpu_group(
    request: GroupRequest,
    *,
    notify: Callable[[str], None],
    init: Callable[..., None] | None = None,
) -> None:
    """Make the default process group for ranks on the CPU: the fastest one that their hosts allow.

    It is in shared memory if all ranks are on one host, and hierarchical if a host has several of them; otherwise it is
    of Gloo. All ranks call this. They agree on the backend, also if RANKLESS_BACKEND differs between them.

    Args:
        request: The group.
        notify: Called on rank 0 with the reason if a host has no memory to share.
        init: What to call with the backend. Default: `dist.init_process_group`, as it was before our own hook.
    """
    opened: SharedGroup | HostsGroup | Support | None = None
    if request.size > 1:
        opened = _open_group(request)
        if isinstance(opened, Support) and request.rank == 0 and _is_surprise(opened, request):
            notify(f"collectives use Gloo instead of shared memory: {opened.reason}")
    backend = "gloo"
    if isinstance(opened, SharedGroup | HostsGroup):
        backend = "shared_memory" if isinstance(opened, SharedGroup) else "hierarchical"
    (init or find_original_init())(
        backend,
        store=request.store,
        rank=request.rank,
        world_size=request.size,
        timeout=request.timeout,
        pg_options=None if backend == "gloo" else opened,
    )


def _is_surprise(support: Support, request: GroupRequest) -> bool:
    """Whether the user does not know the reason for Gloo from the choice of the backend, or from RANKLESS_BACKEND."""
    if support is NO_MEMORY:
        return True
    return request.has_several_hosts and support is not ONE_RANK_PER_HOST and "RANKLESS_BACKEND" not in support.reason


def _open_group(request: GroupRequest) -> SharedGroup | HostsGroup | Support:
    register_backend()
    register_hierarchical_backend()
    # A store may serve several groups one after the other, so each has keys of its own.
    number = request.store.add(f"rankless/shared memory/{request.rank}", 1)
    choice = environment.user_backend()
    objection = f"RANKLESS_BACKEND={choice}" if choice not in (None, "shared_memory", "hierarchical") else ""
    member = Membership(
        rank=request.rank,
        global_ranks=tuple(range(request.size)),
        timeout_seconds=request.timeout.total_seconds(),
        must_be_abortable=request.must_be_abortable,
    )
    if not request.has_several_hosts:
        store = _derive(request.store, f"rankless/shared memory {number}")
        opened = open_shared_group(store, member, request.timeout, objection=objection)
        if opened is not SEVERAL_HOSTS:
            return opened
    store = _derive(request.store, f"rankless/hosts {number}")
    return open_hosts_group(store, member, request.timeout, objection=objection)


def _derive(store: Any, prefix: str) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # not in the stubs


def _wait_for_count(store: Any, key: str, world_size: int) -> int:
    """Wait until the counter has reached `world_size`, for at most STORE_TIMEOUT, and return the counter."""
    start = notified = time.monotonic()
    interval_seconds = 0.001
    while (count := int(store.add(key, 0))) < world_size:
        now = time.monotonic()
        if now - start > STORE_TIMEOUT.total_seconds():
            break
        if now - notified > NOTICE_AFTER_SECONDS:
            notified = now
            print_notice(f"{count} of {world_size} ranks have joined; waiting for the others")
        time.sleep(interval_seconds)
        interval_seconds = min(2 * interval_seconds, 0.02)
    return count


def make_world_mesh(device: torch.device, axes: Sequence[PlannedAxis] = ()) -> Mesh:
    """Return the mesh of all workers. Collective if it has several axes.

    PyTorch's `DeviceMesh` makes the process groups.

    Args:
        device: This worker's device.
        axes: The axes from the outermost. Those with one worker are left out. Default: one axis `data`.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Mesh.solo(device)
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    divided = [axis for axis in axes if axis.size > 1]
    if not divided:
        return Mesh(rank=rank, size=size, device=device, group=world)
    if len(divided) == 1:
        (axis,) = divided
        made = MeshAxis(
            name=axis.name,
            role=read_role(axis),
            rank=rank,
            size=size,
            group=world,
            stage_workers=axis.stage_workers,
        )
        return Mesh(rank=rank, size=size, device=device, group=world, axes=(made,))
    names = tuple(axis.name for axis in divided)
    grid = init_device_mesh(device.type, tuple(axis.size for axis in divided), mesh_dim_names=names)
    made_axes = tuple(
        MeshAxis(
            name=axis.name,
            role=read_role(axis),
            rank=grid.get_local_rank(axis.name),
            size=axis.size,
            group=grid.get_group(axis.name),
        )
        for axis in divided
    )
    return Mesh(rank=rank, size=size, device=device, group=world, axes=made_axes)


def make_group_of_equals(mesh: Mesh, key: Sequence[int]) -> Mesh:
    """Return those workers of a mesh that have the same key, with a group of their own. Collective.

    Args:
        mesh: All workers.
        key: The numbers of this one; none on all workers if all are equal.
    """
    if not key or mesh.size == 1:
        return mesh
    keys = all_gather_bytes(encode_msgpack(list(key)), mesh=mesh)
    chosen = mesh
    for each in dict.fromkeys(keys) if len(set(keys)) > 1 else ():
        ranks = [rank for rank, known in enumerate(keys) if known == each]
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        if mesh.rank in ranks:
            chosen = Mesh(rank=ranks.index(mesh.rank), size=len(ranks), device=mesh.device, group=group)
    return chosen


def read_role(axis: PlannedAxis) -> AxisRole:
    """Return the role of a planned axis, which the plan has as text."""
    return next(role for role in get_args(AxisRole) if role == axis.role)
