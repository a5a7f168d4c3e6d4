"""Joining and leaving a job, and this process's rank and size in it."""

from collections.abc import Sequence
from typing import Any

from rankless.config import environment
from rankless.extensions.horovod import context
from rankless.extensions.horovod.common import process_sets as sets
from rankless.extensions.horovod.common.builds import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from rankless.extensions.horovod.common.process_sets import ProcessSet


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job. Without a launcher, this process becomes rank 0 of 1. A second call does nothing.

    Args:
        comm: The ranks that take part. Default all.
        process_sets: Sets to register, or "dynamic" to let `add_process_set` register sets later.

    Raises:
        ValueError: `comm` is an MPI communicator, or a process set is given twice.
        HorovodInternalError: A process did not join within HOROVOD_START_TIMEOUT.
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
    """Leave the job. `init` may be called again. A second call does nothing."""
    context.shutdown()


def is_initialized() -> bool:
    """Return whether this process has joined the job."""
    return context.is_initialized()


def size() -> int:
    """Return the number of processes in the job."""
    return context.current().world.size


def local_size() -> int:
    """Return the number of processes on this host."""
    return context.current().world.local_size


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank."""
    return context.current().world.cross_size


def rank() -> int:
    """Return this process's rank among all, from 0."""
    return context.current().world.rank


def local_rank() -> int:
    """Return this process's rank on its host, from 0."""
    return context.current().world.local_rank


def cross_rank() -> int:
    """Return this host's index among the hosts that have a process with this local rank, from 0."""
    return context.current().world.cross_rank


def is_homogeneous() -> bool:
    """Return whether every host has equally many processes."""
    return context.current().world.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to record a timeline on rank 0, for chrome://tracing.

    Args:
        file_path: The file to write.
        mark_cycles: Whether to mark each cycle of the coordinator. Default False.

    Raises:
        ValueError: HOROVOD_TIMELINE=DYNAMIC is not set.
    """
    current = context.current()
    if current.settings.timeline != "DYNAMIC":
        raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
    if current.world.rank == 0:
        current.scheduler.timeline.start(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Stop the recording, and complete the file."""
    context.current().scheduler.timeline.stop()


class HorovodBasics:
    """The functions of this module and of `builds` as methods, for tools that make one.

    Args:
        pkg_path: Ignored, as all arguments. Horovod finds its compiled library by them.
    """

    init = staticmethod(init)
    shutdown = staticmethod(shutdown)
    is_initialized = staticmethod(is_initialized)
    start_timeline = staticmethod(start_timeline)
    stop_timeline = staticmethod(stop_timeline)
    is_homogeneous = staticmethod(is_homogeneous)
    size = staticmethod(size)
    local_size = staticmethod(local_size)
    cross_size = staticmethod(cross_size)
    rank = staticmethod(rank)
    local_rank = staticmethod(local_rank)
    cross_rank = staticmethod(cross_rank)
    mpi_threads_supported = staticmethod(mpi_threads_supported)
    mpi_enabled = staticmethod(mpi_enabled)
    mpi_built = staticmethod(mpi_built)
    gloo_enabled = staticmethod(gloo_enabled)
    gloo_built = staticmethod(gloo_built)
    nccl_built = staticmethod(nccl_built)
    ddl_built = staticmethod(ddl_built)
    ccl_built = staticmethod(ccl_built)
    cuda_built = staticmethod(cuda_built)
    rocm_built = staticmethod(rocm_built)

    def __init__(self, pkg_path: str = "", *args: Any) -> None:  # Horovod's
        pass
