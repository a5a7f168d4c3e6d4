"""A step on 2 workers that divide each layer, against `torch.distributed.tensor.parallel` with the same division."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row

AIM = 1.0


def rows() -> Iterator[Row]:
    """Yield one row per model."""
    for model in ("gpt", "mlp"):
        with tempfile.TemporaryDirectory() as folder:
            run(rankless_run(2, "tensor_parallel.py", model, mesh="tensor=2"), threads=1, folder=folder)
            times = json.loads((Path(folder) / "times.json").read_text())
        yield make_row(f"tensor_parallel_{model}", peer="torch tensor parallel", times=times, aim=AIM)
