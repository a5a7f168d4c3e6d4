"""Steps of 2 workers with 8 tables on 2 servers: with and without asking for the rows of the next batch early."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row


def rows() -> Iterator[Row]:
    """Yield one row for each number of samples in a batch."""
    for batch in (512, 4096):
        with tempfile.TemporaryDirectory() as folder:
            run(rankless_run(2, "early_rows.py", "--batch", str(batch), servers=2), threads=1, folder=folder)
            times = json.loads((Path(folder) / "times.json").read_text())
        yield make_row(f"early_rows_{batch}", peer="rows when needed", times=times, aim=1.0)
