"""Sets of ranks that run operations of their own, as Horovod's `ProcessSet`.

Note [ids are looked up]: which sets exist, and under which ids, is known to the negotiated operations alone. A
ProcessSet holds its ranks and asks for its id, so an object is right after a shutdown, after elastic training has
started anew with other ranks, and after another object of the same ranks was removed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from rankless.compat.horovod import context
from rankless.compat.horovod.engine.requests import Kind, Submission

NOT_RANKS = "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object"
NO_MPI = (
    "Apparently you tried to build a ProcessSet from an MPI communicator, "
    "but Horovod has not been built with MPI support. "
    "Rankless needs no MPI: pass a list of ranks."
)
NEEDS_DYNAMIC = "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {} process sets after Horovod initialization."


class ProcessSet:
    """Some of the ranks. Give it to `hvd.init(process_sets=[…])` or `hvd.add_process_set`, then to operations."""

    mpi_comm = None
    """Always None: there is no MPI here."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(NO_MPI)
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(NOT_RANKS)
        self._ranks = sorted(ranks)

    @property
    def ranks(self) -> list[int]:
        """In ascending order, counted over the whole job."""
        return self._ranks

    @property
    def process_set_id(self) -> int | None:
        """The number under which the set is registered on all ranks; None if it is not."""
        if not context.is_initialized():
            return None
        return id_of(tuple(self.ranks), context.current().negotiator.sets)

    def size(self) -> int | None:
        """How many ranks it has; None if it is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's place among the set's ranks; None if the set is not registered.

        Raises ValueError in a process that is not part of it.
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
    """All ranks of the job, under the id 0; none before `hvd.init()`."""

    process_set_id = 0

    def __init__(self) -> None:
        super().__init__([])

    @property
    def ranks(self) -> list[int]:
        """From 0 to size() - 1."""
        return list(range(context.current().world.size)) if context.is_initialized() else []

    def size(self) -> int:
        """How many ranks the job has."""
        return context.current().world.size

    def rank(self) -> int:
        """This process's rank."""
        return context.current().world.rank

    def included(self) -> bool:
        """True: every process is part of it."""
        return context.current().world.rank >= 0


global_process_set = GlobalProcessSet()
"""What operations use unless told otherwise."""


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """The set, registered. Every rank of the job calls this, also those that are not part of it.

    Raises ValueError if the set exists already, and unless HOROVOD_DYNAMIC_PROCESS_SETS=1 was set before `hvd.init()`.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if not context.current().settings.dynamic_process_sets:
        raise ValueError(NEEDS_DYNAMIC.format("adding"))
    if added.process_set_id is not None:
        raise ValueError(f"Attempted to add a duplicate process set: {added}")
    register(added)
    return added


def register(process_set: ProcessSet) -> None:
    """Make the set known on all ranks, which call this together. Raises ValueError for ranks that there are not."""
    size = context.current().world.size
    if not process_set.ranks or not all(0 <= rank < size for rank in process_set.ranks):
        raise ValueError(f"A process set needs ranks from 0 to {size - 1}; found {process_set.ranks}.")
    _together(Submission(kind=Kind.ADD_SET, ranks=tuple(process_set.ranks)))


def remove_process_set(process_set: ProcessSet) -> bool:
    """Whether the set was there and is now removed. Every rank of the job calls this. All ranks stay a set for ever.

    Raises ValueError unless HOROVOD_DYNAMIC_PROCESS_SETS=1 was set before `hvd.init()`.
    """
    set_id = process_set.process_set_id
    if set_id is None or set_id == 0:
        return False
    if not context.current().settings.dynamic_process_sets:
        raise ValueError(NEEDS_DYNAMIC.format("removing"))
    _together(Submission(kind=Kind.REMOVE_SET, set_id=set_id))
    return True


def id_of(ranks: tuple[int, ...], sets: Mapping[int, tuple[int, ...]]) -> int | None:
    """Under which number `ranks` are registered in `sets`, if they are."""
    return next((set_id for set_id, members in sets.items() if tuple(members) == ranks), None)


def _together(submission: Submission) -> Any:
    negotiator = context.current().negotiator
    handle = negotiator.new_handle()
    negotiator.submit(handle, [submission])
    return negotiator.synchronize(handle)[0]
