"""A step with divided parameters on 2 workers against FSDP2: same model, batch and threads."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row

AIM = 0.8


def rows() -> Iterator[Row]:
    """Yield one row per model."""
    for model in ("mlp", "gpt"):
        with tempfile.TemporaryDirectory() as folder:
            run(rankless_run(2, "steps.py", model, "--zero", "parameters"), threads=1, folder=folder)
            times = json.loads((Path(folder) / "times.json").read_text())
        yield make_row(f"divided_{model}", peer="FSDP2", times=times, aim=AIM)
