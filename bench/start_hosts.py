"""From the command to the first collective on two hosts (network namespaces) of two workers each, against torchrun."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.hosts import Hosts, two_hosts

from bench.commands import BIN, LIMIT_SECONDS, SCRIPTS
from bench.pairs import Row, make_row, measure

AIM = 0.5
WORKERS = 2
PORT = "29622"
SCRIPT = str(SCRIPTS / "first_collective.py")


def rows() -> Iterator[Row]:
    """Yield one row for hosts started by hand, as torchrun needs it, and one for hosts that Rankless starts by ssh."""
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        listed = ",".join(f"{address}:{WORKERS}" for address in hosts.addresses)
        ours = [str(BIN / "rankless"), "run", "--hosts", listed, "--no-progress", "--devices", "cpu"]
        by_hand = [*ours, "--no-ssh", "--insecure", SCRIPT]
        theirs = [
            [
                *(str(BIN / "torchrun"), "--nnodes", "2", "--nproc-per-node", str(WORKERS), "--node-rank", str(place)),
                *("--master-addr", hosts.addresses[0], "--master-port", PORT, SCRIPT),
            ]
            for place in range(2)
        ]
        runs = {"by_hand": [by_hand, by_hand], "by_ssh": [[*ours, SCRIPT]]}
        for name, commands in runs.items():
            times = measure(
                lambda commands=commands: seconds_to_report(hosts, commands),
                lambda: seconds_to_report(hosts, theirs),
                pairs=5,
            )
            yield make_row(f"start_2_hosts_{name}", peer="torchrun", times=times, aim=AIM)


def seconds_to_report(hosts: Hosts, commands: Sequence[Sequence[str]]) -> float:
    """Return the seconds from the start of a command on each host, or on the first alone, until rank 0 reports."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        jobs = [
            hosts.start(name, command, cwd=Path(folder), env={"OMP_NUM_THREADS": "1"})
            for name, command in zip(("a", "b"), commands, strict=False)
        ]
        for job in jobs:
            _, errors = job.communicate(timeout=LIMIT_SECONDS)
            if job.returncode != 0:
                raise RuntimeError(errors)
        return float((Path(folder) / "reached").read_text()) - start
