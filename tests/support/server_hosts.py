"""Starts jobs on two hosts whose parameter servers are stand-ins, as a user does who types the line on both."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from support.hosts import ROOT, Hosts
from support.jobs import is_alive, read_process_ids, wait_until
from support.servers import SERVE, install_server

A, B = "10.77.0.1", "10.77.0.2"
RUN_BY_HAND = (sys.executable, "-m", "rankless", "run", "--no-warm", "--no-ssh", "--insecure", "--hang-timeout", "60")


class Ended(NamedTuple):
    """What the command on each host has left: exit codes, standard outputs and errors."""

    codes: list[int]
    outputs: list[str]
    errors: list[str]


def start(
    hosts: Hosts,
    folder: Path,
    script: str,
    *,
    servers: Sequence[str] = (f"--servers={A},{B}",) * 2,
    workers: str = f"--workers={A},{B}",
    server: str = SERVE,
    names: str = "ab",
) -> list[subprocess.Popen[str]]:
    """Type a line on both hosts, or on those in `names`, with stand-ins for servers."""
    (folder / "script.py").write_text(script)
    variables = install_server(folder, server)
    variables["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    return [
        hosts.start(name, [*RUN_BY_HAND, *own.split(), workers, "script.py"], cwd=folder, env=variables)
        for name, own in zip(names, servers, strict=False)
    ]


def finish(jobs: list[subprocess.Popen[str]], folder: Path) -> Ended:
    """Wait until both commands have ended, and check that they have left no process."""
    texts = [job.communicate(timeout=120) for job in jobs]
    assert not [name for name, process_id in read_process_ids(folder).items() if is_alive(process_id)]
    return Ended([job.returncode for job in jobs], [out for out, _ in texts], [err for _, err in texts])


def run(hosts: Hosts, folder: Path, script: str, **options) -> Ended:
    return finish(start(hosts, folder, script, **options), folder)


def wait_for_processes(jobs: Sequence[subprocess.Popen[str]], folder: Path, count: int = 4) -> dict[str, int]:
    """Return the ids of a job's processes, by name, once so many have written theirs, or the job has ended."""
    wait_until(lambda: len(read_process_ids(folder)) == count or any(job.poll() is not None for job in jobs))
    return read_process_ids(folder)
