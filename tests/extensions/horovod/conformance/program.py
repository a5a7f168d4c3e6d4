"""Runs every check of Horovod's behaviour on every rank of one job. Each rank writes a line of JSON per check.

Each check is a function whose docstring is a sentence of Horovod's documented behaviour. All ranks make all checks, so
a check that fails ends the job: what comes after it would not meet.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch

MODULES = (
    "ranks",
    "leaving",
    "naming",
    "reducing",
    "data_movement",
    "disagreeing",
    "sets_and_joins",
    "optimizing",
    "broadcasting",
    "normalizing",
)


def checks() -> dict[str, Callable[[], None]]:
    """By name, in the order in which they are made."""
    found: dict[str, Callable[[], None]] = {}
    for module in MODULES:
        for name, value in vars(importlib.import_module(module)).items():
            if name.startswith("check_"):
                found[f"{module}.{name.removeprefix('check_')}"] = value
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    hvd.init()
    rank = hvd.rank()
    with (folder / f"{rank}.jsonl").open("w") as results:
        for name, check in checks().items():
            if not hvd.is_initialized():
                hvd.init()
            torch.manual_seed(0)
            error = ""
            try:
                check()
                hvd.barrier()
            except Exception:
                error = traceback.format_exc()
            results.write(json.dumps({"name": name, "error": error}) + "\n")
            results.flush()
            if error:
                sys.exit(f"{name} on rank {rank}: {error}")
    hvd.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(Path(sys.argv[1]))
