"""`rankless.collectives` against torch.distributed on 2 workers: the cost of the check before each collective."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row

SIZES = {"4_kib": 4 << 10, "1_mib": 1 << 20}
OPERATIONS = ("all_reduce", "all_gather_single")


def rows() -> Iterator[Row]:
    """Yield one row per collective and size."""
    for operation in OPERATIONS:
        for name, size in SIZES.items():
            with tempfile.TemporaryDirectory() as folder:
                run(rankless_run(2, "collectives.py", operation, str(size)), threads=1, folder=folder)
                times = json.loads((Path(folder) / "times.json").read_text())
            yield make_row(f"{operation}_{name}", peer="torch.distributed", times=times, aim=1.05)
