"""The time from the SIGKILL of one of 4 workers to the end of the next new step, and the cost of being ready for it.

With `zero=`, other workers have copies of shards (`--copies 1`), on which they step, too.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.commands import rankless_run, run, torchrun
from bench.pairs import Row, make_row, measure

WORKERS = 4
KILLS = 5
COMMAND = 4
"""The words of a command before its other options: rankless run -n N."""
READY_STEPS = 40


def rows() -> Iterator[Row]:
    """Yield one row for each. The peer of the first starts all workers again, from a checkpoint of 5 steps before."""
    ours, peer = rankless_run(WORKERS, "recovery.py"), torchrun(WORKERS, "recovery.py", "--ddp")
    peer[1:1] = ["--max-restarts", "1"]
    times = measure(lambda: seconds_in(ours, "seconds"), lambda: seconds_in(peer, "seconds"), pairs=KILLS)
    yield make_row("recovery_after_kill", peer="torchrun --max-restarts", times=times)
    yield make_row("recovery_seconds", peer="a second", times=[(seconds, 1.0) for seconds, _ in times], aim=1.0)
    yield compare_steps("recovery_ready_step", ours, aim=1.02)
    for level in ("optimizer", "gradients", "parameters"):
        sharded = [*ours, "--zero", level]
        yield compare_steps(f"recovery_ready_zero_{level}", sharded, copies=("--copies", "1"), aim=1.05)
    killed = [*sharded[:COMMAND], "--copies", "1", *sharded[COMMAND:]]
    seconds = [seconds_in(killed, "seconds") for _ in range(KILLS)]
    times = [(each, 1.0) for each in seconds]
    yield make_row("recovery_zero_parameters_seconds", peer="a second", times=times, aim=1.0)


def compare_steps(name: str, command: Sequence[str], *, copies: Sequence[str] = (), aim: float) -> Row:
    """Return the row of a step that can lose a worker, beside one of a run that needs every worker."""
    steps = ("--steps", str(READY_STEPS))
    ready = [*command[:COMMAND], *copies, *command[COMMAND:], *steps]
    unready = [*command[:COMMAND], "--min-workers", str(WORKERS), *command[COMMAND:], *steps]
    times = measure(lambda: seconds_in(ready, "step_seconds"), lambda: seconds_in(unready, "step_seconds"), pairs=KILLS)
    return make_row(name, peer="a run that needs every worker", times=times, aim=aim)


def seconds_in(command: Sequence[str], name: str) -> float:
    """Run a command, and return the number that it has written to a file."""
    with tempfile.TemporaryDirectory() as folder:
        run(command, threads=1, folder=folder)
        return float((Path(folder) / name).read_text())
