"""Gives a script that makes its own Gloo group one in shared memory, or a hierarchical one, where that is safe.

It is safe if all ranks of the run are in the group, on the CPU, and the script asks for nothing that only Gloo has. The
decision follows from the run and the call, so all ranks make the same one. A script that relies on the name of the
backend, or runs with TORCH_DISTRIBUTED_DEBUG=DETAIL, keeps Gloo by `--backend gloo` or by itself.
"""

import functools
import importlib
import inspect
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as groups

from rankless.runtime.rendezvous.original_init import ORIGINAL

_CPU_BACKENDS = (None, "gloo", "cpu:gloo")
_OWN_BACKENDS = ("shared_memory", "hierarchical")
RETRY_SECONDS = 0.02


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
        if os.getpid() != process_id or not _is_safe(call.arguments, rank, world_size):
            init(*args, **kwargs)
            return
        given = call.arguments
        timeout = given["timeout"] or groups.default_pg_timeout
        # Imported here: a script that makes no group needs none of this.
        process_groups = importlib.import_module("rankless.runtime.rendezvous.process_group")

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
    for module in (groups, dist):
        _replace(module, init_process_group, barrier)


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


def _replace(module: Any, init_process_group: Callable[..., None], monitored_barrier: Callable[..., Any]) -> None:
    module.init_process_group = init_process_group
    module.monitored_barrier = monitored_barrier
