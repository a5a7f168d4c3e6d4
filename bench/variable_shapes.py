"""Training on 200 lengths, in any order, against one length of the same mean; captures included."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, measure, row

PAIRS = 3


def seconds(lengths: str) -> float:
    """Seconds of all steps, from the first call, which captures, to the last."""
    with tempfile.TemporaryDirectory() as folder:
        run(rankless_run(2, "variable_shapes.py", lengths), threads=1, folder=folder)
        return float(json.loads((Path(folder) / "seconds.json").read_text()))


def rows() -> Iterator[Row]:
    """One row."""
    times = measure(lambda: seconds("varying"), lambda: seconds("fixed"), pairs=PAIRS)
    yield row("200_lengths", peer="one length of the same mean", times=times, aim=1.2)
