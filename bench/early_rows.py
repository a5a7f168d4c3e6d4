"""What workers ask servers for before they need it.

- Steps of 2 workers with 8 tables on 2 servers: with and without asking for the rows of the next batch early.
- Steps of 2 workers that train on batches of their own (`async`): against workers that wait after each step.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row, measure


def rows() -> Iterator[Row]:
    """Yield one row for each number of samples in a batch, and one for steps in `async`."""
    for batch in (512, 4096):
        with tempfile.TemporaryDirectory() as folder:
            run(rankless_run(2, "early_rows.py", "--batch", str(batch), servers=2), threads=1, folder=folder)
            times = json.loads((Path(folder) / "times.json").read_text())
        yield make_row(f"early_rows_{batch}", peer="rows when needed", times=times, aim=1.0)
    times = measure(_measure_own_steps, lambda: _measure_own_steps("--waits"), pairs=5)
    yield make_row("async_steps", peer="waiting for servers", times=times, aim=1.0)


def _measure_own_steps(*arguments: str) -> float:
    """Return the seconds of a step in `async`."""
    command = rankless_run(2, "own_steps.py", *arguments, servers=2, server_mode="async")
    with tempfile.TemporaryDirectory() as folder:
        run(command, threads=1, folder=folder)
        return float((Path(folder) / "step_seconds").read_text())
