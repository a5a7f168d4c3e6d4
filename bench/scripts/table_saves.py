"""Measures saves of a table of many rows: the whole, and after few steps only what has changed. Bytes and seconds.

Both saves go to new folders, and the whole one after each other one, so that neither profits from the order. Seconds
are the median of the rounds. They contain the sync to the disk, and the time to copy the table's contents, which is
also printed alone. Bytes are those of files that no earlier checkpoint has.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import rankless


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table")
    parser.add_argument("--dim", type=int, default=16, help="elements of a row")
    parser.add_argument("--steps", type=int, default=10, help="steps between two saves")
    parser.add_argument("--batch", type=int, default=512, help="ids in a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="an existing folder on the disk to measure. Default: a temporary one"
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        result = measure(arguments, folder)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the medians of all rounds."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-(2**63), 2**63 - 1, (arguments.rows,), generator=generator)
    table = rankless.parameter_server.Embedding(arguments.dim, seed=1)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        table(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in ids.split(65_536):
        step(batch)
    series = rankless.checkpoints(folder / "series")
    series.save(0, table=table)
    seconds: dict[str, list[float]] = {"contents": [], "whole": [], "changes": []}
    sizes: dict[str, list[int]] = {"whole": [], "changes": []}
    for number in range(1, arguments.rounds + 1):
        for _ in range(arguments.steps):
            step(ids[torch.randint(arguments.rows, (arguments.batch,), generator=generator)])
        alone = folder / f"alone-{number}"
        seconds["contents"].append(timed(table.get_extra_state))
        seconds["whole"].append(timed(lambda alone=alone: rankless.save(alone, table=table)))
        seconds["changes"].append(timed(lambda number=number: series.save(number, table=table)))
        sizes["whole"].append(new_bytes(alone))
        sizes["changes"].append(new_bytes(folder / "series" / f"step-{number}"))
        shutil.rmtree(alone)
    return {
        **{f"{name}_seconds": statistics.median(values) for name, values in seconds.items()},
        **{f"{name}_bytes": statistics.median(values) for name, values in sizes.items()},
    }


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def new_bytes(folder: Path) -> int:
    """Return the bytes of files that no other checkpoint has."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.stat().st_nlink == 1)


if __name__ == "__main__":
    main()
