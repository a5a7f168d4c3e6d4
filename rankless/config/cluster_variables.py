"""The environment variables of MPI's launchers, of Slurm's `srun`, and of Kubernetes' indexed jobs.

They give a process its rank. Slurm's also lead to the address of rank 0. The others need `MASTER_ADDR` and
`MASTER_PORT`, and Kubernetes does not say how many processes there are. They also tell how long a job has to end.
"""

import re
import signal
import subprocess
from collections.abc import Mapping
from typing import Literal

import msgspec

from rankless.errors import ConfigError

Launcher = Literal["mpirun", "srun", "Kubernetes"]

UNKNOWN_SIZE = 0
FIRST_PORT = 10_000
PORTS = 20_000
"""Ports of jobs under `srun` without `MASTER_PORT`, below those that Linux gives to outgoing connections."""
DEFAULT_GRACE_SECONDS = 30.0
"""As torchrun's. Kubernetes and Slurm give a job as much, unless they are told otherwise."""
RESERVE_SECONDS = 5.0
"""What the agents of all hosts need of the time of Kubernetes or Slurm after the workers have ended."""
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)
_CONFIG_TIMEOUT_SECONDS = 2.0


class ClusterWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A process that a cluster's launcher has started as one of several."""

    launcher: Launcher
    rank: int
    world_size: int
    """UNKNOWN_SIZE if the launcher does not say it."""
    local_rank: int = 0
    address: str | None = None
    """The address of rank 0's host, if the launcher says it."""
    port: int = 0
    """A port for the rendezvous there, the same in all processes; 0 if the launcher leads to none."""


_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""Rank, size and local rank: of Open MPI, of MPICH and Intel MPI."""
_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
"""Variables that `srun` sets. A batch script has the number of its job's tasks too, but is no task itself."""


def read_cluster_worker(variables: Mapping[str, str]) -> ClusterWorker | None:
    """Return what the variables of a cluster's launcher say; None without valid ones, and for a job of one process.

    `mpirun` may run inside Slurm's step, and both inside a pod: the launcher that is nearest to the process decides.
    """
    mpi, slurm = _read_mpi(variables), _read_slurm(variables)
    if mpi is None:
        return slurm or _read_kubernetes(variables)
    # `srun --mpi=pmi2` sets MPICH's variables too, and knows the address.
    by_srun = slurm is not None and (mpi.rank, mpi.world_size) == (slurm.rank, slurm.world_size)
    return slurm if by_srun else mpi


def _read_mpi(variables: Mapping[str, str]) -> ClusterWorker | None:
    for names in _MPI_VARIABLES:
        rank, size, local_rank = (variables.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size) > 1:
            local = int(local_rank) if local_rank.isdecimal() else 0
            return ClusterWorker(launcher="mpirun", rank=int(rank), world_size=int(size), local_rank=local)
    return None


def _read_slurm(variables: Mapping[str, str]) -> ClusterWorker | None:
    rank = variables.get("SLURM_PROCID", "")
    size = next(
        (variables[name] for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") if name in variables), ""
    )
    if not rank.isdecimal() or not size.isdecimal() or not int(rank) < int(size) > 1:
        return None
    if int(rank) == 0 and not any(name in variables for name in _SLURM_STEP):
        return None  # a batch script
    local_rank = variables.get("SLURM_LOCALID", "")
    return ClusterWorker(
        launcher="srun",
        rank=int(rank),
        world_size=int(size),
        local_rank=int(local_rank) if local_rank.isdecimal() else 0,
        address=_find_first_host(variables),
        port=_choose_port(variables),
    )


def _find_first_host(variables: Mapping[str, str]) -> str | None:
    """Return the address of the first host of a step, where rank 0 runs unless the tasks are distributed by hand."""
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    count = variables.get("SLURM_STEP_NUM_NODES") or variables.get("SLURM_NNODES")
    first = expand_first_host(nodes)
    is_alone = count == "1" or (count is None and first is not None and first == nodes)
    return "127.0.0.1" if is_alone else first


def expand_first_host(nodes: str) -> str | None:
    """Return the first name of Slurm's list of hosts, such as "node[08-10,12],login1"; None for an empty list."""
    found = re.match(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*", nodes.strip())
    name = "" if found is None else found[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name) or None


def expand_hosts(nodes: str) -> list[str]:
    """Return the names in Slurm's list of hosts, as "node[08-10,12],login1" has five.

    `scontrol show hostnames` does the same, but a container may lack it.
    """
    items = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes.strip())
    return [name for item in items for name in _expand_item(item)]


def _expand_item(item: str) -> list[str]:
    found = re.match(r"([^\[]*)\[([^\]]*)\](.*)", item)
    if found is None:
        return [item]
    head, numbers, tail = found.groups()
    expanded = []
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and last.isdecimal():
            expanded += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
        else:
            expanded.append(part)
    return [head + number + rest for number in expanded for rest in _expand_item(tail)]


def read_node_count(variables: Mapping[str, str]) -> int | None:
    """Return the number of nodes of a step of `srun`; None if Slurm does not tell."""
    count = variables.get("SLURM_STEP_NUM_NODES") or variables.get("SLURM_NNODES") or ""
    return int(count) if count.isdecimal() else None


def _choose_port(variables: Mapping[str, str]) -> int:
    """Return a port that differs between the jobs and steps of a host as far as possible; 0 without a job's number."""
    job, step = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID", "0"))
    if not job.isdecimal():
        return 0
    return FIRST_PORT + (int(job) * 7 + (int(step) if step.isdecimal() else 0)) % PORTS


def _read_kubernetes(variables: Mapping[str, str]) -> ClusterWorker | None:
    """Return the pod of an indexed job. Its size is that of WORLD_SIZE, which the job's author sets."""
    index, size = variables.get("JOB_COMPLETION_INDEX", ""), variables.get("WORLD_SIZE", "")
    if not index.isdecimal() or size == "1":
        return None
    known = int(size) if size.isdecimal() and int(index) < int(size) else UNKNOWN_SIZE
    return ClusterWorker(launcher="Kubernetes", rank=int(index), world_size=known)


def list_warning_signals(variables: Mapping[str, str]) -> tuple[int, ...]:
    """Return the signals with which the cluster manager of this process says that the job will end soon.

    Slurm sends what `--signal` names. Its users take SIGUSR1 or SIGUSR2, which have no other meaning.
    """
    return (signal.SIGUSR1, signal.SIGUSR2) if "SLURM_JOB_ID" in variables else ()


def choose_grace(seconds: float | None, variables: Mapping[str, str]) -> float:
    """Return how long workers may take to end after a signal from outside the run.

    It is the user's number, or a little less than what the cluster manager gives, or 30 s.

    Raises `ConfigError` for a value that is no number of seconds.
    """
    if seconds is None:
        return _default_grace(variables)
    if not 0 <= seconds < float("inf"):
        raise ConfigError(
            expected="--grace-seconds as a number of seconds from 0 up",
            found=seconds,
            fix="give the time that workers need to save after SIGTERM, or omit the option",
        )
    return seconds


def _default_grace(variables: Mapping[str, str]) -> float:
    if "SLURM_JOB_ID" in variables:
        return _shorten(read_kill_wait())
    if "KUBERNETES_SERVICE_HOST" in variables:
        return _shorten(DEFAULT_GRACE_SECONDS)  # a pod cannot see its terminationGracePeriodSeconds
    return DEFAULT_GRACE_SECONDS


def _shorten(seconds: float) -> float:
    return max(seconds - RESERVE_SECONDS, seconds / 2)


def read_kill_wait() -> float:
    """Return how long Slurm waits between SIGTERM and SIGKILL; its default where `scontrol` does not tell."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CONFIG_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return DEFAULT_GRACE_SECONDS
    found = _KILL_WAIT.search(done.stdout)
    return DEFAULT_GRACE_SECONDS if found is None else float(found[1])
