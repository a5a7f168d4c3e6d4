"""Tables of rows against `nn.Embedding(sparse=True)`: the same ids, optimizer and gradients, in one process.

The peer knows the number of its rows, and its ids are row numbers. Ours has rows for all ids before the first
measurement. `read` is a lookup without gradients. `step` is a lookup, its backward pass and the optimizer's step.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import SCRIPTS, run
from bench.pairs import Row, make_row

SIZES = ((4096, 16), (65536, 64))


def rows() -> Iterator[Row]:
    """Yield one row per measured part, optimizer, and number of ids and elements of a row."""
    for ids, dim in SIZES:
        for part in ("read", "step_sgd", "step_adagrad", "step_sparse_adam"):
            with tempfile.TemporaryDirectory() as folder:
                run([sys.executable, str(SCRIPTS / "tables.py"), part, str(ids), str(dim)], threads=1, folder=folder)
                times = json.loads((Path(folder) / "times.json").read_text())
            yield make_row(f"table_{part}_{ids}x{dim}", peer="nn.Embedding(sparse=True)", times=times, aim=1.0)
