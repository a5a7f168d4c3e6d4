"""What every call's checks cost: the digest by which ranks compare their calls, and the guards of captured Python.

`ours` is the time in them per step, the peer is the whole step they are part of: the ratio is their share.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, row


def rows() -> Iterator[Row]:
    """A row per check and model."""
    for check in ("digest", "guards"):
        for model in ("mlp", "lenet", "gpt"):
            with tempfile.TemporaryDirectory() as folder:
                run(rankless_run(2, "checks.py", model, check), threads=1, folder=folder)
                times = json.loads((Path(folder) / "times.json").read_text())
            yield row(f"{check}_{model}", peer="the whole step", times=times, aim=0.01)
