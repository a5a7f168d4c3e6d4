"""Which environment variables a job's processes get, and the ranks that a launcher has set."""

import re
from collections.abc import Mapping

from rankless.config import environment
from rankless.extensions.horovodrun.launched_worker import horovod_variables

IGNORED = re.compile(r"BASH_FUNC_.*\(\)|BASH_FUNC_.*%%|OLDPWD|.*[^\w].*")
"""Shell functions, and names that a command line cannot set."""


def is_exportable(v: str) -> bool:
    """Return whether a launcher passes the variable of that name on to other hosts."""
    return IGNORED.fullmatch(v) is None


def get_env_rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of processes, as a launcher has set them; 0 and 1 without a launcher.

    Reads HOROVOD_RANK and HOROVOD_SIZE, or the variables of torchrun or MPI.
    """
    variables: Mapping[str, str] = horovod_variables()
    rank, size = variables.get("RANK", ""), variables.get("SIZE", "")
    if rank.isdigit() and size.isdigit():
        return int(rank), int(size)
    worker = environment.read_torchrun()
    return (0, 1) if worker is None else (worker.rank, worker.world_size)
