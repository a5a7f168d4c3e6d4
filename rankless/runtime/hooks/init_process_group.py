"""Replaces `init_process_group` for scripts that make their own default group: a faster group, and the run's store.

A Gloo group is made in shared memory, or hierarchical, where that is safe (`use_fastest_group`). It is safe if all
ranks of the run are in the group, on the CPU, and the script asks for nothing that only Gloo has. The decision follows
from the run and the call, so all ranks make the same one. A script that relies on the name of the backend, or runs with
TORCH_DISTRIBUTED_DEBUG=DETAIL, keeps Gloo by `--backend gloo` or by itself.

The group gets the store of the run instead of one that anyone can reach (`use_run_store`). PyTorch's own store would
listen on all interfaces of the host, and accept every connection. The store of the run asks for its token. A script
gets it if it asks for a store at an address, and its rank and the number of ranks are those of the run: then all ranks
of the run make the call. A store that the script opens itself is the script's.
"""

import functools
import importlib
import inspect
import itertools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as groups

from rankless.config import environment
from rankless.config.process_configs import WorkerConfig
from rankless.runtime.rendezvous.connect_to_run_store import open_worker_store

_CPU_BACKENDS = (None, "gloo", "cpu:gloo")
_OWN_BACKENDS = ("shared_memory", "hierarchical")
_ADDRESSED = ("env://", "tcp://")
RETRY_SECONDS = 0.02
ORIGINAL = "rankless_original"
"""The attribute of a hook's function with the function of PyTorch that it replaces."""


def find_original_init() -> Callable[..., None]:
    """Return `dist.init_process_group`, or what our hooks call in its place.

    A group that cannot have shared memory is made of Gloo. The hook would try to share memory again.
    """
    init: Callable[..., None] = dist.init_process_group
    return getattr(init, ORIGINAL, init)


def use_fastest_group(
    rank: int, world_size: int, notify: Callable[[str], None], *, has_several_hosts: bool = False
) -> None:
    """Replace `init_process_group`, and `monitored_barrier`, which PyTorch restricts to Gloo.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks, all of which call this.
        notify: Called on rank 0 with the reason if there is no shared memory.
        has_several_hosts: Whether the launcher has started the ranks on several hosts. Default: it has not.
    """
    process_id, has_had_group = os.getpid(), False
    init, monitored_barrier = groups.init_process_group, groups.monitored_barrier
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        nonlocal has_had_group
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        # A process that the script forks is no rank of the run: it keeps PyTorch's function.
        if os.getpid() != process_id or not _is_safe(call.arguments, rank, world_size):
            init(*args, **kwargs)
            return
        given = call.arguments
        timeout = given["timeout"] or groups.default_pg_timeout
        # Imported here: a script that makes no group needs none of this.
        process_groups = importlib.import_module("rankless.runtime.process_groups")

        def make_group() -> None:
            request = process_groups.GroupRequest(
                store=_find_store(given, timeout),
                rank=rank,
                size=world_size,
                timeout=timeout,
                has_several_hosts=has_several_hosts,
            )
            process_groups.init_cpu_group(request, notify=notify, init=init)

        if has_had_group and rank != 0 and given["store"] is None:
            _try_until(make_group, time.monotonic() + timeout.total_seconds())
        else:
            make_group()
        has_had_group = True

    setattr(init_process_group, ORIGINAL, init)
    barrier = _extend_barrier(monitored_barrier)
    module: Any
    for module in (groups, dist):
        module.init_process_group, module.monitored_barrier = init_process_group, barrier


def _extend_barrier(monitored_barrier: Callable[..., Any]) -> Callable[..., Any]:
    """Return `monitored_barrier` for our groups too."""

    @functools.wraps(monitored_barrier)
    def barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        found: Any = dist.group.WORLD if group is None else group
        if isinstance(found, dist.ProcessGroup) and dist.get_backend(found) in _OWN_BACKENDS:
            return found.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]  # our classes have it
        return monitored_barrier(group, timeout, wait_all_ranks)

    return barrier


def _try_until(make_group: Callable[[], None], deadline: float) -> None:
    """Make a group after another one. This rank may have reached the store of the one before, which rank 0 closes."""
    while True:
        try:
            make_group()
        except dist.DistNetworkError:
            if dist.is_initialized() or time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)
        else:
            return


def _is_safe(given: dict[str, Any], rank: int, world_size: int) -> bool:
    backend = given["backend"]
    return (
        (backend.lower() if isinstance(backend, str) else backend) in _CPU_BACKENDS
        and given["rank"] in (-1, rank)
        and given["world_size"] in (-1, world_size)
        and not dist.is_initialized()
        and given["pg_options"] is None
        and given["device_id"] is None
        and given.get("_ranks") is None
        and not torch.cuda.is_available()
        and dist.get_debug_level() != dist.DebugLevel.DETAIL  # type: ignore[attr-defined]  # public, missing in the stubs
    )


def _find_store(given: dict[str, Any], timeout: timedelta) -> Any:
    """Return the store that the call names, as `init_process_group` finds it."""
    if given["store"] is not None:
        return given["store"]
    method = given["init_method"] or "env://"
    store, _, _ = next(dist.rendezvous(method, given["rank"], given["world_size"], timeout=timeout))  # type: ignore[attr-defined]  # public, missing in the stubs
    store.set_timeout(timeout)
    return dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]  # public, missing in the stubs


def use_run_store(config: WorkerConfig) -> None:
    """Replace `init_process_group` in a worker."""
    process_id, numbers, rank, world_size = os.getpid(), itertools.count(), config.rank, config.world_size
    open_store = functools.cache(functools.partial(open_worker_store, config))
    init = groups.init_process_group
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if os.getpid() == process_id and not dist.is_initialized() and _is_of_run(given, rank, world_size):
            # A script may make a group after another one, whose keys the store still has.
            store = dist.PrefixStore(f"script/{next(numbers)}/default_pg", open_store())  # type: ignore[attr-defined]  # public, missing in the stubs
            given |= {"init_method": None, "store": store, "rank": rank, "world_size": world_size}
        init(**call.arguments)  # by name, for functions around it that set an argument

    setattr(init_process_group, ORIGINAL, getattr(init, ORIGINAL, init))
    module: Any
    for module in (groups, dist):
        module.init_process_group = init_process_group


def _is_of_run(given: dict[str, Any], rank: int, world_size: int) -> bool:
    """Whether a call asks for a store at an address, for all ranks of the run."""
    method = given["init_method"]
    # With a query, the address itself names rank or world size.
    if given["store"] is not None or given.get("_ranks") is not None or "?" in (method or ""):
        return False
    wants = (given["rank"], given["world_size"])
    own_rank, own_size = environment.rank_and_size()
    found = tuple(own if each == -1 else each for each, own in zip(wants, (own_rank, own_size), strict=True))
    return found == (rank, world_size) and (method or "env://").startswith(_ADDRESSED)
