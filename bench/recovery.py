"""The time from the SIGKILL of one of 4 workers to the end of the next new step, and the cost of being ready for it.

The killed worker is replaced. The peers are torchrun, which starts all again, and torchft, which continues without the
killed worker's rows. With `zero=`, other workers have copies of shards (`--copies 1`), on which they step, too.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.commands import SCRIPTS, rankless_run, run, torchrun
from bench.pairs import Row, make_row, measure

WORKERS = 4
KILLS, PAIRS = 10, 5
COMMAND = 4
"""The words of a command before its other options: rankless run -n N."""
READY_STEPS = 40


def rows() -> Iterator[Row]:
    """Yield one row for each. The peer of the first starts all workers again, from a checkpoint of 5 steps before."""
    ours, peer = rankless_run(WORKERS, "recovery.py"), torchrun(WORKERS, "recovery.py", "--ddp")
    peer[1:1] = ["--max-restarts", "1"]
    phases: list[dict[str, float]] = []
    times = measure(lambda: seconds_in(ours, "seconds", phases), lambda: seconds_in(peer, "seconds"), pairs=KILLS)
    yield make_row("recovery_after_kill", peer="torchrun --max-restarts", times=times)
    torchft = ["env", f"PYTHONPATH={SCRIPTS.parents[1]}:{install_peer('torchft')}", sys.executable]
    theirs = [*torchft, str(SCRIPTS / "recovery_torchft.py")]
    times = measure(lambda: seconds_in(ours, "seconds"), lambda: seconds_in(theirs, "seconds"), pairs=PAIRS)
    yield make_row("recovery_after_kill_torchft", peer="torchft", times=times)
    yield from describe_recovery("recovery", phases[1:])  # without that of the warm-up
    yield compare_steps("recovery_ready_step", ours, aim=1.02)
    for level in ("optimizer", "gradients", "parameters"):
        sharded = [*ours, "--zero", level]
        yield compare_steps(f"recovery_ready_zero_{level}", sharded, copies=("--copies", "1"), aim=1.05)
    killed, phases = [*sharded[:COMMAND], "--copies", "1", *sharded[COMMAND:]], []
    for _ in range(KILLS):
        seconds_in(killed, "seconds", phases)
    yield from describe_recovery("recovery_zero_parameters", phases)


def install_peer(name: str) -> Path:
    """Install a peer that is no part of the development environment, once, and return the folder of its packages."""
    folder, listed = SCRIPTS.parents[1] / "build" / "peers" / name, SCRIPTS.parents[1] / "requirements" / f"{name}.txt"
    if not folder.exists():
        new = folder.with_suffix(".new")
        words = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(new), "--requirement", str(listed))
        subprocess.run([sys.executable, *words], check=True)
        new.rename(folder)
    return folder


def describe_recovery(name: str, recoveries: Sequence[dict[str, float]]) -> Iterator[Row]:
    """Yield rows beside a second: how long each phase took, and the whole: its median, and the 95th percentile."""
    before = [0.0] * len(recoveries)
    for phase in ("detected", "released", "regrouped", "seconds"):
        moments = [each[phase] for each in recoveries]
        spans = [(moment - earlier, 1.0) for moment, earlier in zip(moments, before, strict=True)]
        yield make_row(f"{name}_{'first_step' if phase == 'seconds' else phase}", peer="a second", times=spans)
        before = moments
    yield make_row(f"{name}_seconds", peer="a second", times=[(each, 1.0) for each in before], aim=1.0)
    p95 = statistics.quantiles(before, n=20, method="inclusive")[-1]
    yield make_row(f"{name}_seconds_p95", peer="a second", times=[(p95, 1.0)])


def compare_steps(name: str, command: Sequence[str], *, copies: Sequence[str] = (), aim: float) -> Row:
    """Return the row of a step that can lose a worker, beside one of a run that needs every worker."""
    steps = ("--steps", str(READY_STEPS))
    ready = [*command[:COMMAND], *copies, *command[COMMAND:], *steps]
    unready = [*command[:COMMAND], "--min-workers", str(WORKERS), *command[COMMAND:], *steps]
    times = measure(lambda: seconds_in(ready, "step_seconds"), lambda: seconds_in(unready, "step_seconds"), pairs=PAIRS)
    return make_row(name, peer="a run that needs every worker", times=times, aim=aim)


def seconds_in(command: Sequence[str], name: str, phases: list[dict[str, float]] | None = None) -> float:
    """Run a command, and return the number that it has written to a file.

    Args:
        command: The command.
        name: The name of the file.
        phases: Gets the number with the phases of a recovery before it. Default: they are not read.
    """
    with tempfile.TemporaryDirectory() as folder:
        run(command, threads=1, folder=folder)
        seconds = float((Path(folder) / name).read_text())
        if phases is not None:
            phases.append({**json.loads((Path(folder) / "phases").read_text()), "seconds": seconds})
        return seconds
