"""Training on 200 lengths in random order, against one length of the same mean. Includes captures."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row, measure

PAIRS = 3


def measure_seconds(lengths: str) -> float:
    """Return the seconds of all steps, from the first call, which captures, to the last."""
    with tempfile.TemporaryDirectory() as folder:
        run(rankless_run(2, "variable_shapes.py", lengths), threads=1, folder=folder)
        return float(json.loads((Path(folder) / "seconds.json").read_text()))


def rows() -> Iterator[Row]:
    """Yield one row."""
    times = measure(lambda: measure_seconds("varying"), lambda: measure_seconds("fixed"), pairs=PAIRS)
    yield make_row("200_lengths", peer="one length of the same mean", times=times, aim=1.2)
