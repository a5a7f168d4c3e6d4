"""The time from the SIGKILL of one of 4 workers to the end of the next new step, and the cost of being ready for it."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.commands import rankless_run, run, torchrun
from bench.pairs import Row, make_row, measure

WORKERS = 4
KILLS = 5
READY_STEPS = 40


def rows() -> Iterator[Row]:
    """Yield one row for each. The peer of the first starts all workers again, from a checkpoint of 5 steps before."""
    ours, peer = rankless_run(WORKERS, "recovery.py"), torchrun(WORKERS, "recovery.py", "--ddp")
    peer[1:1] = ["--max-restarts", "1"]
    times = measure(lambda: seconds_in(ours, "seconds"), lambda: seconds_in(peer, "seconds"), pairs=KILLS)
    yield make_row("recovery_after_kill", peer="torchrun --max-restarts", times=times)
    yield make_row("recovery_seconds", peer="a second", times=[(seconds, 1.0) for seconds, _ in times], aim=1.0)
    unready = [*ours[:4], "--min-workers", str(WORKERS), *ours[4:], "--steps", str(READY_STEPS)]
    ready = [*ours, "--steps", str(READY_STEPS)]
    times = measure(lambda: seconds_in(ready, "step_seconds"), lambda: seconds_in(unready, "step_seconds"), pairs=KILLS)
    yield make_row("recovery_ready_step", peer="a run that needs every worker", times=times, aim=1.02)


def seconds_in(command: Sequence[str], name: str) -> float:
    """Run a command, and return the number that it has written to a file."""
    with tempfile.TemporaryDirectory() as folder:
        run(command, threads=1, folder=folder)
        return float((Path(folder) / name).read_text())
