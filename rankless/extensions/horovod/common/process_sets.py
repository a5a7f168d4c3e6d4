"""Sets of ranks that run their own operations, as Horovod's `ProcessSet`.

Note [ids are looked up]: only the operation scheduler knows which sets exist, and their ids. A ProcessSet stores its
ranks and looks its id up. So it stays correct after a shutdown, after elastic training has restarted with other ranks,
and after another ProcessSet of the same ranks was removed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from rankless.extensions.horovod import context
from rankless.extensions.horovod.engine.requests import EngineRequest, OperationKind

NOT_RANKS = "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object"
NO_MPI = (
    "Apparently you tried to build a ProcessSet from an MPI communicator, "
    "but Horovod has not been built with MPI support. "
    "Rankless needs no MPI: pass a list of ranks."
)
NEEDS_DYNAMIC = "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {} process sets after Horovod initialization."


class ProcessSet:
    """Some of the ranks, for operations among them.

    Register it first, with `hvd.init(process_sets=[…])` or `hvd.add_process_set`.

    Args:
        ranks_or_comm: The ranks, counted over the whole job. Raises ValueError for an MPI communicator.
    """

    mpi_comm = None
    """Always None: Rankless does not use MPI."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(NO_MPI)
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(NOT_RANKS)
        self._ranks = sorted(ranks)

    @property
    def ranks(self) -> list[int]:
        """The ranks in ascending order, counted over the whole job."""
        return self._ranks

    @property
    def process_set_id(self) -> int | None:
        """The id under which the set is registered on all ranks, or None if it is not registered."""
        if not context.is_initialized():
            return None
        return find_set_id(tuple(self.ranks), context.current().scheduler.process_sets)

    def size(self) -> int | None:
        """Return the number of ranks, or None if the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's index among the set's ranks, or None if the set is not registered.

        Raises ValueError in a process that is not part of the set.
        """
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError("Process is not part of provided process set.")
        return self.ranks.index(context.current().world.rank)

    def included(self) -> bool:
        """Whether this process is one of the set's ranks."""
        return context.current().world.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class GlobalProcessSet(ProcessSet):
    """All ranks of the job, under the id 0. It has no ranks before `hvd.init()`."""

    process_set_id = 0

    def __init__(self) -> None:
        super().__init__([])

    @property
    def ranks(self) -> list[int]:
        """The ranks from 0 to size() - 1."""
        return list(range(context.current().world.size)) if context.is_initialized() else []

    def size(self) -> int:
        """Return the number of ranks in the job."""
        return context.current().world.size

    def rank(self) -> int:
        """Return this process's rank."""
        return context.current().world.rank

    def included(self) -> bool:
        """Return True: every process is part of the set."""
        return context.current().world.rank >= 0


global_process_set = GlobalProcessSet()
"""The default process set of operations: all ranks."""


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set. Every rank of the job calls this, also those that are not part of the set.

    Args:
        process_set: The set, or its ranks.

    Returns:
        The registered set.

    Raises:
        ValueError: The set exists already, or HOROVOD_DYNAMIC_PROCESS_SETS=1 was not set before `hvd.init()`.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if not context.current().settings.dynamic_process_sets:
        raise ValueError(NEEDS_DYNAMIC.format("adding"))
    if added.process_set_id is not None:
        raise _refused(ValueError(f"Attempted to add a duplicate process set: {added}"))
    register(added)
    return added


def register(process_set: ProcessSet) -> None:
    """Register a set on all ranks, which all call this. Raises ValueError for ranks that do not exist."""
    size = context.current().world.size
    if not process_set.ranks or not all(0 <= rank < size for rank in process_set.ranks):
        raise _refused(ValueError(f"A process set needs ranks from 0 to {size - 1}; found {process_set.ranks}."))
    _run_on_all_ranks(EngineRequest(kind=OperationKind.ADD_SET, ranks=tuple(process_set.ranks)))


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Every rank of the job calls this.

    Args:
        process_set: A registered set. The set of all ranks cannot be removed.

    Returns:
        Whether the set existed and is removed.

    Raises:
        ValueError: HOROVOD_DYNAMIC_PROCESS_SETS=1 was not set before `hvd.init()`.
    """
    set_id = process_set.process_set_id
    if set_id is None or set_id == 0:
        return False
    if not context.current().settings.dynamic_process_sets:
        raise ValueError(NEEDS_DYNAMIC.format("removing"))
    _run_on_all_ranks(EngineRequest(kind=OperationKind.REMOVE_SET, set_id=set_id))
    return True


def find_set_id(ranks: tuple[int, ...], sets: Mapping[int, tuple[int, ...]]) -> int | None:
    """Return the id under which the ranks are registered in `sets`, or None."""
    return next((set_id for set_id, members in sets.items() if tuple(members) == ranks), None)


def _refused(error: ValueError) -> ValueError:
    """Return the error of this rank's call, after letting the calls of other ranks fail."""
    context.current().scheduler.refuse(0, [OperationKind.ADD_SET.value], str(error))
    return error


def _run_on_all_ranks(request: EngineRequest) -> Any:
    scheduler = context.current().scheduler
    handle = scheduler.new_handle()
    scheduler.submit(handle, [request])
    return scheduler.synchronize(handle)[0]
