"""Measures the growth of a table: pushes of ids that it has never seen, their times, and the process's memory per row.

Memory is what the process holds at the end, less what it held before the table. Times are of `Table.push` alone.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import psutil

from rankless.extensions.servers.tables.optimizers import AdagradSettings
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

WARMUP_PUSHES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=20_000_000, help="ids in the end")
    parser.add_argument("--dim", type=int, default=16, help="elements of a row")
    parser.add_argument("--push", type=int, default=4096, help="new ids in a push")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    occurrences = np.ones(arguments.push, np.int64)
    gradients = generator.normal(size=(arguments.push, arguments.dim)).astype(np.float32)
    settings = AdagradSettings(lr=0.1)
    warm = Table(TableSettings(dim=arguments.dim))  # so that the functions are compiled
    for _ in range(WARMUP_PUSHES):
        warm.push(generator.integers(-(2**63), 2**63 - 1, arguments.push), occurrences, gradients, settings)
    del warm
    before = psutil.Process().memory_info().rss
    table = Table(TableSettings(dim=arguments.dim))
    seconds = []
    for _ in range(arguments.ids // arguments.push):
        ids = generator.integers(-(2**63), 2**63 - 1, arguments.push)
        start = time.perf_counter()
        table.push(ids, occurrences, gradients, settings)
        seconds.append(time.perf_counter() - start)
    rows = table.statistics().rows
    milliseconds = np.array(seconds) * 1e3
    numbers = {
        "rows": rows,
        "bytes_per_row": round((psutil.Process().memory_info().rss - before) / rows, 1),
        "p50_milliseconds": round(float(np.percentile(milliseconds, 50)), 2),
        "p99_milliseconds": round(float(np.percentile(milliseconds, 99)), 2),
        "most_milliseconds": round(float(milliseconds.max()), 2),
        "rows_per_second": round(rows / float(sum(seconds))),
    }
    print(json.dumps(numbers, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(numbers))


if __name__ == "__main__":
    main()
