"""A job's step on 2 workers against hand-written DistributedDataParallel: same model, batch and threads."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, row

# With dropout or batch norm ours does more: whole-batch numbers, which DistributedDataParallel does not give.
AIMS = {"mlp": 1.05, "lenet": 1.05, "gpt": 1.05, "mlp_dropout": None, "gpt_dropout": None, "lenet_norm": None}


def rows() -> Iterator[Row]:
    """One row per model."""
    for model, aim in AIMS.items():
        with tempfile.TemporaryDirectory() as folder:
            run(rankless_run(2, "steps.py", model), threads=1, folder=folder)
            times = json.loads((Path(folder) / "times.json").read_text())
        yield row(f"step_{model}", peer="DistributedDataParallel", times=times, aim=aim)
