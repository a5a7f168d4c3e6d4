"""The time from the SIGKILL of one of 4 workers to the end of the next new step, and the cost of being ready for it."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.commands import rankless_run, run, torchrun
from bench.pairs import Row, make_row, measure

WORKERS = 4
READY_STEPS = 40


def rows() -> Iterator[Row]:
    """Yield one row for each. The peer of the first starts all workers again, from a checkpoint of 5 steps before."""
    ours = rankless_run(WORKERS, "recovery.py")
    peer = torchrun(WORKERS, "recovery.py", "--ddp")
    peer[1:1] = ["--max-restarts", "1"]
    times = measure(lambda: seconds_in(ours, "seconds"), lambda: seconds_in(peer, "seconds"), pairs=5)
    yield make_row("recovery_after_kill", peer="torchrun --max-restarts", times=times)
    ready = rankless_run(WORKERS, "recovery.py", "--steps", str(READY_STEPS))
    unready = [*ready[:4], "--min-workers", str(WORKERS), *ready[4:]]
    times = measure(lambda: seconds_in(ready, "step_seconds"), lambda: seconds_in(unready, "step_seconds"), pairs=7)
    yield make_row("recovery_ready_step", peer="a run that ends with a killed worker", times=times, aim=1.02)


def seconds_in(command: Sequence[str], name: str) -> float:
    """Run a command, and return the number that it has written to a file."""
    with tempfile.TemporaryDirectory() as folder:
        run(command, threads=max(1, (os.cpu_count() or 1) // WORKERS), folder=folder)
        return float((Path(folder) / name).read_text())
