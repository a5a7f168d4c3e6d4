"""The first call of a job, which captures and compiles it, against that of `torch.compile(backend="aot_eager")`."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row


def rows() -> Iterator[Row]:
    """Yield one row, for a GPT of 12 layers on 2 workers."""
    with tempfile.TemporaryDirectory() as folder:
        run(rankless_run(2, "captures.py"), threads=1, folder=folder)
        times = json.loads((Path(folder) / "times.json").read_text())
    yield make_row("capture_gpt_12_layers", peer="torch.compile(aot_eager)", times=times, aim=1.0)
