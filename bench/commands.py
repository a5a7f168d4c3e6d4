"""Measures commands: the seconds from their start to their end, or to a report of one of their processes."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
LIMIT_SECONDS = 300.0


def rankless_run(
    workers: int,
    script: str,
    *arguments: str,
    backend: str | None = None,
    mesh: str | None = None,
    servers: int = 0,
    server_mode: str = "sync",
) -> list[str]:
    """Return the command line that runs a script of the benchmarks under `rankless run`."""
    command = [str(BIN / "rankless"), "run", "-n", str(workers), "--no-progress", "--devices", "cpu"]
    chosen = [] if backend is None else ["--backend", backend]
    chosen += [] if mesh is None else ["--mesh", mesh]
    chosen += ["--servers", str(servers), "--server-mode", server_mode] if servers else []
    return [*command, *chosen, str(SCRIPTS / script), *arguments]


def torchrun(workers: int, script: str, *arguments: str) -> list[str]:
    """Return the same for torchrun, with a free port."""
    command = [str(BIN / "torchrun"), "--nproc-per-node", str(workers), "--rdzv-backend", "c10d"]
    return [*command, "--rdzv-endpoint", "localhost:0", str(SCRIPTS / script), *arguments]


def run(command: Sequence[str], *, threads: int, folder: str) -> None:
    """Run `command` in `folder`. Raises with its output if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(SCRIPTS.parents[1])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")


def seconds_to_end(command: Sequence[str]) -> float:
    """Return the seconds from the start of `command` to its end."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        run(command, threads=1, folder=folder)
        return time.monotonic() - start


def seconds_to_report(command: Sequence[str]) -> float:
    """Return the seconds from the start of `command` to the time that rank 0 writes to the file `reached`."""
    threads = max(1, (os.cpu_count() or 1) // 2)
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        run(command, threads=threads, folder=folder)
        return float((Path(folder) / "reached").read_text()) - start
