"""The environment variables of MPI's launchers: they give a process its rank, but no address of the others."""

from collections.abc import Mapping

import msgspec


class MpiWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A process that `mpirun` or `mpiexec` has started."""

    rank: int
    world_size: int
    local_rank: int


_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""Rank, size and local rank: of Open MPI, of MPICH and Intel MPI."""


def mpi_worker(variables: Mapping[str, str]) -> MpiWorker | None:
    """Return what MPI's variables contain; None without valid ones, and for a job of one process."""
    for names in _VARIABLES:
        rank, size, local_rank = (variables.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size) > 1:
            local = int(local_rank) if local_rank.isdecimal() else 0
            return MpiWorker(rank=int(rank), world_size=int(size), local_rank=local)
    return None
