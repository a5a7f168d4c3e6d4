"""A job's call against its own program and optimizer step alone: what a call costs beside its computation.

All times are divided by the number of parameters, so `ours - peer's` is the cost of each.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row


def rows() -> Iterator[Row]:
    """Yield one row, for a model of 800 parameters on 2 workers: the time of a call, divided by the parameters."""
    with tempfile.TemporaryDirectory() as folder:
        run(rankless_run(2, "overhead.py"), threads=1, folder=folder)
        found = json.loads((Path(folder) / "times.json").read_text())
    times = [(call / found["parameters"], inside / found["parameters"]) for call, inside in found["times"]]
    yield make_row("overhead_per_parameter", peer="its program and step", times=times, extra_aim=5e-6)
