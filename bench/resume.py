"""How long it takes to restore a model and its optimizer from disk, against torch.load (which checks no checksum)."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, row


def rows() -> Iterator[Row]:
    """One row per number of workers, for the same state as `save_stall`'s."""
    for workers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            run(rankless_run(workers, "saves.py", "resume"), threads=1, folder=folder)
            times = json.loads((Path(folder) / "times.json").read_text())
        yield row(f"resume_{workers}", peer="torch.load", times=times, aim=None)
