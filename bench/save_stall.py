"""How long a save stalls training: a background save against a synchronous save, on one worker and on two."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row

AIM = 0.1


def rows() -> Iterator[Row]:
    """Yield one row per number of workers: a GPT of 20 million parameters with Adam's state, 240 MB."""
    for workers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            run(rankless_run(workers, "saves.py", "stall"), threads=1, folder=folder)
            times = json.loads((Path(folder) / "times.json").read_text())
        yield make_row(f"save_stall_{workers}", peer="the same save, waited for", times=times, aim=AIM)
