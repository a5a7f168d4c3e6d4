"""Gives a script that makes its default group itself the store of the run, instead of one that anyone can reach.

`init_process_group` would open PyTorch's own store, on all interfaces of the host, which accepts every connection. The
store of the run asks for its token. A script gets it if it asks for a store at an address, and its rank and the number
of ranks are those of the run: then all ranks of the run make the call. A store that the script opens itself is the
script's.
"""

import functools
import inspect
import itertools
import os
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as groups

from rankless.config import environment
from rankless.config.worker_config import WorkerConfig
from rankless.runtime.rendezvous.original_init import ORIGINAL
from rankless.runtime.rendezvous.run_store import open_worker_store

_ADDRESSED = ("env://", "tcp://")


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
    for module in (groups, dist):
        setattr(module, "init_process_group", init_process_group)  # noqa: B010  # both modules have it


def _is_of_run(given: dict[str, Any], rank: int, world_size: int) -> bool:
    """Whether a call asks for a store at an address, for all ranks of the run."""
    method = given["init_method"]
    if given["store"] is not None or given.get("_ranks") is not None or "?" in (method or ""):
        return False
    wants = (given["rank"], given["world_size"])
    own_rank, own_size = environment.rank_and_size()
    found = tuple(own if each == -1 else each for each, own in zip(wants, (own_rank, own_size), strict=True))
    return found == (rank, world_size) and (method or "env://").startswith(_ADDRESSED)
