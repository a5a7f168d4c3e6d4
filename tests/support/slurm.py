"""A real Slurm on this machine, with a network namespace for each node. Needs root, and Debian's packages of Slurm."""

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).with_name("slurm.sh")
_LOCK = "/tmp/rankless-slurm.lock"
NEEDED = ("slurmctld", "slurmd", "srun", "munged", "ip", "nsenter")

requires_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(name) is None for name in NEEDED),
    reason="needs root, and slurmctld, slurmd, slurm-client, munge and iproute2",
)


class Slurm:
    """A cluster of Slurm that runs."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = os.environ | environment

    def start(self, *command: str, cwd: Path) -> subprocess.Popen[str]:
        """Start a command on the login node, such as `srun` with its arguments."""
        line = ["bash", str(_SCRIPT), "run", "env", "-C", str(cwd), *command]
        return subprocess.Popen(
            line, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *command: str, cwd: Path = Path("/")) -> str:
        """Run a command on the login node and return its output."""
        return self.start(*command, cwd=cwd).communicate(timeout=120)[0]

    def job_number(self, name: str) -> str:
        """Return the number of the job of that name; "" if none runs."""
        return self.run("squeue", "-h", "-n", name, "-o", "%i").strip()


@contextlib.contextmanager
def started_slurm(folder: Path, *, nodes: int = 2) -> Iterator[Slurm]:
    """Run a cluster of `nodes` nodes, whose files are in `folder`, while the context lasts.

    One at a time: the control groups of jobs are named after nodes and numbers of jobs, which all clusters have alike.
    """
    number = os.getpid() % 200 + 20
    environment = {
        "SLURM_DIR": str(folder / "slurm"),
        "SLURM_TAG": f"sl{os.getpid()}",
        "SLURM_NET": f"10.79.{number}",
        "SLURM_CPUS": "16",
    }
    line = ["bash", str(_SCRIPT)]
    lock = open(_LOCK, "w")  # noqa: SIM115  # closed below
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        subprocess.run([*line, "start", str(nodes)], env=os.environ | environment, check=True, timeout=120)
        yield Slurm(environment)
    finally:
        subprocess.run([*line, "stop"], env=os.environ | environment, check=False, timeout=60)
        lock.close()
