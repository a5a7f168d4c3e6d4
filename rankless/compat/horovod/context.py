"""The process's one Horovod: made by `init`, asked by every call, ended by `shutdown`."""

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch.distributed as dist

from rankless.compat.horovod.engine.operation_scheduler import OperationScheduler
from rankless.compat.horovod.engine.rendezvous import Met, meet
from rankless.compat.horovod.settings import Settings, read_settings
from rankless.config import environment
from rankless.config.horovod_variables import read_rank_assignment
from rankless.config.rank_layout import assign_ranks
from rankless.records.elastic_messages import RankAssignment
from rankless.runtime import current_process as runtime
from rankless.runtime.elastic_round import membership
from rankless.runtime.rendezvous.job_store import RendezvousInfo

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class World(RankAssignment, frozen=True, kw_only=True):
    """Where this process is among all; `local` is on its host, `cross` among the processes of its local rank."""

    is_homogeneous: bool
    """Whether every host has as many processes."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What `init` has made."""

    world: World
    negotiator: OperationScheduler
    settings: Settings
    process_id: int


_context: Context | None = None
_times = 0


def init(comm: Any = None) -> None:
    """Come together with all other processes of the job; once more does nothing.

    `comm`: ranks that are to be a world of their own; the others are each alone. Raises JoinError, or
    HorovodInternalError, that names who does not come, and ValueError for a communicator of MPI.
    """
    global _context, _times  # Horovod's API is global by nature (DESIGN.md)
    if is_initialized():
        return
    settings = read_settings(environment.horovod_variables())
    member = membership()
    if member is not None:
        # Each round has a store of its own, and a worker that has just come knows of no round before.
        _context = member.meet(lambda met: _made(met.place, comm, "once", settings))
        member.when_over(_context.negotiator.give_up)
    else:
        _times += 1
        _context = _made(runtime.current_rendezvous(), comm, str(_times), settings)
    atexit.register(shutdown)


def _made(whole: RendezvousInfo, comm: Any, times: str, settings: Settings) -> Context:
    place, name = _among(whole, comm)
    store = dist.PrefixStore(f"horovod/{times}/{name}", place.store)  # type: ignore[attr-defined]  # not in the stubs
    met = meet(
        store,
        rank=place.rank,
        size=place.size,
        address=place.address,
        timeout_seconds=settings.start_timeout_seconds,
    )
    negotiator = OperationScheduler(met, rank=place.rank, store=store, settings=settings)
    world = _world(place, met)
    if world.rank == 0 and settings.timeline not in ("", "DYNAMIC"):
        negotiator.timeline.start(settings.timeline, mark_cycles=settings.marks_cycles)
    return Context(world=world, negotiator=negotiator, settings=settings, process_id=os.getpid())


def shutdown() -> None:
    """Leave; other processes that still wait for this one get an error. After that `init` may come again."""
    global _context  # as above
    context, _context = _context, None
    atexit.unregister(shutdown)
    if context is not None and context.process_id == os.getpid():
        context.negotiator.close()


def is_initialized() -> bool:
    """Whether this process, itself and not the one it was forked from, has come through `init`."""
    return _context is not None and _context.process_id == os.getpid()


def current() -> Context:
    """What `init` has made. Raises ValueError before it."""
    if _context is None or _context.process_id != os.getpid():
        raise ValueError(NOT_INITIALIZED)
    return _context


def _among(place: RendezvousInfo, comm: Any) -> tuple[RendezvousInfo, str]:
    """The place in the world of the ranks named, and a name for that world."""
    if comm is None:
        return place, "all"
    if not isinstance(comm, Sequence):
        raise ValueError(
            "Horovod MPI is not enabled: pass a list of ranks, or nothing. Rankless needs no MPI, and cannot use a "
            "communicator of mpi4py."
        )
    ranks = sorted(set(comm))
    if list(comm) == list(range(place.size)) or not ranks:
        return place, "all"
    if place.rank not in ranks:
        return RendezvousInfo(rank=0, size=1, store=place.store), f"alone-{place.rank}"
    name = "-".join(map(str, ranks))
    return RendezvousInfo(rank=ranks.index(place.rank), size=len(ranks), store=place.store, address=place.address), name


def _world(place: RendezvousInfo, met: Met) -> World:
    assignment = _told(place) or place.assignment or assign_ranks(met.hosts)[place.rank]
    sizes = {met.hosts.count(host) for host in met.hosts}
    return World(**msgspec.structs.asdict(assignment), is_homogeneous=len(sizes) == 1)


def _told(place: RendezvousInfo) -> RankAssignment | None:
    """Where this process is by Horovod's variables, if a launcher has set them for this place: two names of hosts may
    mean one machine.
    """
    told = environment.horovod_variables()
    is_this_place = (told.get("RANK"), told.get("SIZE")) == (str(place.rank), str(place.size))
    return read_rank_assignment(told) if is_this_place and told.get("ELASTIC") != "1" else None
