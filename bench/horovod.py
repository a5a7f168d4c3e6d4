"""Rankless's Horovod API against torch.distributed on 2 workers: the optimizer's step, and single allreduces."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row

CALLS = {
    "4_kib": (("4096",), 0.3),
    "4_kib_while_python_runs": (("4096", "--busy"), 1.5),
    "1_mib": ((str(1 << 20), "--calls", "20"), None),
    "64_mib": ((str(64 << 20), "--calls", "1"), 1.05),
}
STEPS = ("mlp", "lenet")


def rows() -> Iterator[Row]:
    """Yield one row per model and size."""
    for model in STEPS:
        times = _measure_times("horovod_steps.py", model)
        yield make_row(f"horovod_step_{model}", peer="DistributedDataParallel", times=times, aim=1.1)
    for name, (arguments, aim) in CALLS.items():
        times = _measure_times("horovod_calls.py", *arguments)
        yield make_row(f"horovod_allreduce_{name}", peer="Gloo", times=times, aim=aim)


def _measure_times(script: str, *arguments: str) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        run(rankless_run(2, script, *arguments, backend="gloo"), threads=1, folder=folder)
        times: list[tuple[float, float]] = json.loads((Path(folder) / "times.json").read_text())
        return times
