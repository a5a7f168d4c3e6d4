"""The time to load a model and its optimizer from disk, against torch.load, which verifies no checksum."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row


def rows() -> Iterator[Row]:
    """Yield one row per number of workers, for the same state as in `save_stall`."""
    for workers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            run(rankless_run(workers, "saves.py", "resume"), threads=1, folder=folder)
            times = json.loads((Path(folder) / "times.json").read_text())
        yield make_row(f"resume_{workers}", peer="torch.load", times=times, aim=None)
