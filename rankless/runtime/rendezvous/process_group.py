"""Makes the default process group of a job: in shared memory where all ranks are on one host, else of Gloo or NCCL.

No other module makes process groups, except for a process that is alone.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from rankless.collectives.backends import register_backend
from rankless.collectives.backends.group_failure import Membership
from rankless.collectives.backends.shared_group import NO_MEMORY, SharedGroup, open_shared_group
from rankless.config import environment
from rankless.config.run_config import Backend
from rankless.errors import JoinError
from rankless.runtime.rendezvous.job_rendezvous import STORE_TIMEOUT, print_notice
from rankless.runtime.rendezvous.original_init import find_original_init
from rankless.runtime.rendezvous.tcp import NOTICE_AFTER_SECONDS

JOINED_KEY = "rankless/joined"
"""The store's counter of the ranks that have made the group."""
CONFIRMED_KEY = "rankless/confirmed"
"""The store's counter of the ranks that know that all have made it."""


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """The default process group that all ranks of a job are to make.

    Attributes:
        store: A `torch.distributed.Store` that all ranks share.
        rank: This process's rank.
        size: The number of ranks.
        timeout: How long the ranks wait for each other in its collectives.
    """

    store: Any
    rank: int
    size: int
    timeout: timedelta = default_pg_timeout


def make_world_group(
    backend: Backend, device: torch.device, *, store: Any, rank: int, world_size: int
) -> Callable[[], None]:
    """Make the process group of the world, and return the function that destroys it.

    Returns only after all ranks have made the group: a rank whose script ends at once would otherwise be gone while
    others still connect to it. Rank 0, whose process serves the store, destroys the group only after all ranks know
    that. Raises JoinError if some ranks have not made the group within STORE_TIMEOUT.
    """
    if backend == "shared_memory":
        init_shared_memory_group(GroupRequest(store=store, rank=rank, size=world_size), notify=print_notice)
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


def init_shared_memory_group(
    request: GroupRequest,
    *,
    notify: Callable[[str], None],
    init: Callable[..., None] | None = None,
) -> None:
    """Make the default process group in shared memory, or of Gloo if the ranks cannot share any.

    All ranks call this. They agree on the backend, also if RANKLESS_BACKEND differs between them.

    Args:
        request: The group.
        notify: Called on rank 0 with the reason if there is no memory.
        init: What to call with the backend. Default: `dist.init_process_group`, as it was before our own hook.
    """
    opened = None
    if request.size > 1:
        opened = _open_memory(request)
        if opened is NO_MEMORY and request.rank == 0:
            notify(f"collectives use Gloo instead of shared memory: {NO_MEMORY.reason}")
    shared = opened if isinstance(opened, SharedGroup) else None
    (init or find_original_init())(
        "gloo" if shared is None else "shared_memory",
        store=request.store,
        rank=request.rank,
        world_size=request.size,
        timeout=request.timeout,
        pg_options=shared,
    )


def _open_memory(request: GroupRequest) -> Any:
    register_backend()
    # A store may serve several groups one after the other, so each has keys of its own.
    number = request.store.add(f"rankless/shared memory/{request.rank}", 1)
    choice = environment.user_backend()
    return open_shared_group(
        dist.PrefixStore(f"rankless/shared memory {number}", request.store),  # type: ignore[attr-defined]  # not in the stubs
        Membership(
            rank=request.rank,
            global_ranks=tuple(range(request.size)),
            timeout_seconds=request.timeout.total_seconds(),
        ),
        request.timeout,
        objection=f"RANKLESS_BACKEND={choice}" if choice not in (None, "shared_memory") else "",
    )


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
