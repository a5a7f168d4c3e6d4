"""The Horovod context of this process: `init` creates it, every call uses it, `shutdown` ends it."""

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch.distributed as dist

from rankless.config import environment
from rankless.errors import JoinError
from rankless.extensions.horovod.engine.operation_scheduler import OperationScheduler
from rankless.extensions.horovod.engine.rendezvous import ConnectedRanks, connect_ranks
from rankless.extensions.horovod.settings import Settings, read_settings
from rankless.extensions.horovodrun.launched_worker import horovod_variables, rank_variables, read_rank_assignment
from rankless.records.elastic_driver_protocol import RankAssignment, assign_ranks
from rankless.runtime.current_context import current_rendezvous
from rankless.runtime.elastic_round import current_member
from rankless.runtime.rendezvous.find_rendezvous import RendezvousInfo

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class HorovodWorld(RankAssignment, frozen=True, kw_only=True):
    """This process's position: among all, `local` on its host, and `cross` among the processes of its local rank."""

    is_homogeneous: bool
    """Whether every host has equally many processes."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What `init` creates."""

    world: HorovodWorld
    scheduler: OperationScheduler
    settings: Settings
    process_id: int


_context: Context | None = None
_init_count = 0


def init(comm: Any = None) -> None:
    """Connect with all other processes of the job. A second call does nothing.

    Args:
        comm: The ranks that form this job's world. Each other rank forms a world of its own. Default all.

    Raises:
        JoinError or HorovodInternalError: A process did not join within the timeout. The text names it. JoinError also
            in a child process of a worker.
        ValueError: `comm` is an MPI communicator.
    """
    global _context, _init_count  # one context per process, as Horovod's API requires
    if is_initialized():
        return
    if environment.is_child_of_worker():
        raise JoinError(
            expected="hvd.init() in a process that the launcher has started, because only those have a rank",
            found=f"process {os.getpid()}, a child of a worker: it would train alone, as rank 0 of 1",
            fix="call hvd.init() in the script itself only, below `if __name__ == '__main__':` if it starts processes; "
            f"for a job of its own, unset {environment.WORKER_PLAN} in the child's environment",
        )
    settings = read_settings(horovod_variables())
    member = current_member()
    if member is not None:
        # Each round has its own store, and a new worker does not know the number of earlier rounds.
        _context = member.join_next_round(lambda round: _make_context(round.rendezvous_info, comm, "once", settings))
        member.on_round_ended(_context.scheduler.abort)
        environment.apply(rank_variables(_context.world))  # they change from round to round
    else:
        _init_count += 1
        _context = _make_context(current_rendezvous(), comm, str(_init_count), settings)
    atexit.register(shutdown)


def _make_context(job_rendezvous: RendezvousInfo, comm: Any, generation: str, settings: Settings) -> Context:
    rendezvous, name = _select_ranks(job_rendezvous, comm)
    store = dist.PrefixStore(f"horovod/{generation}/{name}", rendezvous.store)  # type: ignore[attr-defined]  # not in the stubs
    connected = connect_ranks(
        store,
        rank=rendezvous.rank,
        size=rendezvous.size,
        address=rendezvous.address,
        timeout_seconds=settings.start_timeout_seconds,
    )
    scheduler = OperationScheduler(connected, rank=rendezvous.rank, store=store, settings=settings)
    world = _make_world(rendezvous, connected)
    if world.rank == 0 and settings.timeline not in ("", "DYNAMIC"):
        scheduler.timeline.start(settings.timeline, mark_cycles=settings.marks_cycles)
    return Context(world=world, scheduler=scheduler, settings=settings, process_id=os.getpid())


def shutdown() -> None:
    """Leave the job. Pending operations of other processes with this one fail. `init` may be called again."""
    global _context  # one context per process, as Horovod's API requires
    context, _context = _context, None
    atexit.unregister(shutdown)
    if context is not None and context.process_id == os.getpid():
        context.scheduler.close()


def is_initialized() -> bool:
    """Whether this process has called `init`. A call in the process from which it was forked does not count."""
    return _context is not None and _context.process_id == os.getpid()


def current() -> Context:
    """Return the context. Raises ValueError before `init`."""
    if _context is None or _context.process_id != os.getpid():
        raise ValueError(NOT_INITIALIZED)
    return _context


def _select_ranks(rendezvous: RendezvousInfo, comm: Any) -> tuple[RendezvousInfo, str]:
    """Return this process's rendezvous in the world of the ranks in `comm`, and a name for that world."""
    if comm is None:
        return rendezvous, "all"
    if not isinstance(comm, Sequence):
        raise ValueError(
            "Horovod MPI is not enabled: pass a list of ranks, or nothing. Rankless needs no MPI, and cannot use a "
            "communicator of mpi4py."
        )
    ranks = sorted(set(comm))
    if list(comm) == list(range(rendezvous.size)) or not ranks:
        return rendezvous, "all"
    if rendezvous.rank not in ranks:
        return RendezvousInfo(rank=0, size=1, store=rendezvous.store), f"alone-{rendezvous.rank}"
    name = "-".join(map(str, ranks))
    return RendezvousInfo(
        rank=ranks.index(rendezvous.rank), size=len(ranks), store=rendezvous.store, address=rendezvous.address
    ), name


def _make_world(rendezvous: RendezvousInfo, connected: ConnectedRanks) -> HorovodWorld:
    position = (
        _read_launcher_position(rendezvous) or rendezvous.assignment or assign_ranks(connected.hosts)[rendezvous.rank]
    )
    sizes = {connected.hosts.count(host) for host in connected.hosts}
    return HorovodWorld(**msgspec.structs.asdict(position), is_homogeneous=len(sizes) == 1)


def _read_launcher_position(rendezvous: RendezvousInfo) -> RankAssignment | None:
    """Return the position in Horovod's environment variables if a launcher has set them for this rank.

    They take precedence over the host names, since two names may mean one machine.
    """
    variables = horovod_variables()
    is_same_rank = (variables.get("RANK"), variables.get("SIZE")) == (str(rendezvous.rank), str(rendezvous.size))
    return read_rank_assignment(variables) if is_same_rank and variables.get("ELASTIC") != "1" else None
