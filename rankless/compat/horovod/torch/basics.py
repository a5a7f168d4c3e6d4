"""Joining and leaving, and who this process is among the others."""

from collections.abc import Sequence
from typing import Any

from rankless.compat.horovod import context
from rankless.compat.horovod.common import process_sets as sets
from rankless.compat.horovod.common.process_sets import ProcessSet
from rankless.config import environment


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job; alone, without a launcher, this process is rank 0 of 1. A second call changes nothing.

    `comm`: the ranks that take part, all by default. `process_sets`: sets to be registered, or "dynamic" to let
    `add_process_set` do so later. Raises ValueError for an MPI communicator, and for a set that is there twice.
    """
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'process_sets is a list of hvd.ProcessSet, or "dynamic"; found {process_sets!r}.')
        environment.apply({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
        process_sets = None
    requested_sets = list(process_sets or ())
    _reject_duplicates(requested_sets)
    if not context.is_initialized():
        context.init(comm)
        for process_set in requested_sets:
            sets.register(process_set)


def _reject_duplicates(process_sets: list[ProcessSet]) -> None:
    seen: set[tuple[int, ...]] = set()
    for index, process_set in enumerate(process_sets):
        if tuple(process_set.ranks) in seen or process_set is sets.global_process_set:
            raise ValueError(
                "Horovod could not be initialized because process_sets entry number "
                f"{index} is a duplicate: {process_set}"
            )
        seen.add(tuple(process_set.ranks))


def shutdown() -> None:
    """Leave the job; `init` joins again. A second call changes nothing."""
    context.shutdown()


def is_initialized() -> bool:
    """Whether this process has joined."""
    return context.is_initialized()


def size() -> int:
    """How many processes have joined."""
    return context.current().world.size


def local_size() -> int:
    """How many of them are on this host."""
    return context.current().world.local_size


def cross_size() -> int:
    """On how many hosts there is a process of this one's local rank."""
    return context.current().world.cross_size


def rank() -> int:
    """This process's number among all, from 0."""
    return context.current().world.rank


def local_rank() -> int:
    """This process's number among those of its host, from 0."""
    return context.current().world.local_rank


def cross_rank() -> int:
    """This host's number among those that have a process of this local rank, from 0."""
    return context.current().world.cross_rank


def is_homogeneous() -> bool:
    """Whether every host has as many processes."""
    return context.current().world.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write what happens from now on to `file_path` on rank 0, for chrome://tracing.

    Raises ValueError unless HOROVOD_TIMELINE=DYNAMIC.
    """
    current = context.current()
    if current.settings.timeline != "DYNAMIC":
        raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
    if current.world.rank == 0:
        current.scheduler.timeline.start(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Write no more, and complete the file."""
    context.current().scheduler.timeline.stop()
