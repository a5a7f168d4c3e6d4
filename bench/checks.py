"""The cost of each call's checks: the digest with which ranks compare their calls, the guards of captured Python, and
the accounts by which an exception of one rank is raised by all (`failures`).

`ours` is the time of the checks per step. The peer is the whole step, so the ratio is the share of the checks.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row


def rows() -> Iterator[Row]:
    """Yield one row per check and model."""
    for check in ("digest", "guards", "failures"):
        for model in ("mlp", "lenet", "gpt"):
            with tempfile.TemporaryDirectory() as folder:
                run(rankless_run(2, "checks.py", model, check), threads=1, folder=folder)
                times = json.loads((Path(folder) / "times.json").read_text())
            yield make_row(f"{check}_{model}", peer="the whole step", times=times, aim=0.01)
