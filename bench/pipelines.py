"""A step in a pipeline of 2 workers against `torch.distributed.pipelining`: same model, cut and microbatches."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row

AIM = 1.0


def rows() -> Iterator[Row]:
    """Yield one row per model and schedule."""
    for model, schedule in (("gpt", "1f1b"), ("gpt", "gpipe"), ("mlp", "1f1b")):
        with tempfile.TemporaryDirectory() as folder:
            command = rankless_run(2, "pipelines.py", model, schedule, mesh="pipeline=2")
            run(command, threads=1, folder=folder)
            times = json.loads((Path(folder) / "times.json").read_text())
        yield make_row(f"pipeline_{model}_{schedule}", peer="torch pipelining", times=times, aim=AIM)
