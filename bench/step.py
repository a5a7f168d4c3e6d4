"""A job's step on 2 workers against hand-written DistributedDataParallel: same model, batch and threads."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row

# With dropout or batch norm Rankless does more: it computes whole-batch numbers, DistributedDataParallel does not.
AIMS = {
    "mlp": 1.05,
    "mlp_100_mb": 0.5,  # most of its step is the sum of gradients, which DistributedDataParallel sends with Gloo
    "lenet": 1.05,
    "gpt": 1.05,
    "attention": 1.05,
    "transformer": 1.05,
    "mlp_dropout": 1.05,
    "gpt_dropout": 1.05,
    "lenet_norm": 1.15,
}


def rows() -> Iterator[Row]:
    """Yield one row per model."""
    for model, aim in AIMS.items():
        with tempfile.TemporaryDirectory() as folder:
            steps = ("--steps", "2") if model == "mlp_100_mb" else ()
            run(rankless_run(2, "steps.py", model, *steps), threads=1, folder=folder)
            times = json.loads((Path(folder) / "times.json").read_text())
        yield make_row(f"step_{model}", peer="DistributedDataParallel", times=times, aim=aim)
