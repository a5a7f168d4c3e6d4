"""The logical view: calls of PyTorch's functions and whole steps on 2 workers, against others in the same run.

A call is compared with the same call on this worker's rows alone, without any view, and with PyTorch's DTensor. A step
is compared with the same step as a job, and with hand-written DistributedDataParallel.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row

# With dropout or batch norm the view does more than DistributedDataParallel: it computes whole-batch numbers.
AIMS = {
    ("resnet", "job"): 1.15,
    ("gpt", "job"): 1.15,
    ("bert", "job"): 1.15,
    ("mlp", "ddp"): 1.05,
    ("gpt", "ddp"): 1.05,
    ("bert", "ddp"): 1.05,
    ("resnet", "ddp"): 1.05,
}
PEERS = {"job": "a job", "ddp": "DistributedDataParallel"}
MOST_ABOVE_PLAIN = 5e-6


def rows() -> Iterator[Row]:
    """Yield two rows per call, and one per model and peer."""
    for (name, peer), times in measure_calls():
        aim = {"extra_aim": MOST_ABOVE_PLAIN} if peer == "plain PyTorch" else {"aim": 1.0}
        yield make_row(f"call_{name}", peer=peer, times=times, **aim)
    for (model, peer), aim in AIMS.items():
        found = read_times("logical_steps.py", model, peer)
        yield make_row(f"logical_{model}", peer=PEERS[peer], times=found, aim=aim)


def measure_calls() -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the name of each call and of its peer, and their times."""
    for name, by_peer in read_times("logical_calls.py").items():
        for peer, times in by_peer.items():
            yield (name, peer), times


def read_times(script: str, *arguments: str) -> Any:
    """Return what a script of the benchmarks writes as its times on 2 workers."""
    with tempfile.TemporaryDirectory() as folder:
        run(rankless_run(2, script, *arguments), threads=1, folder=folder)
        return json.loads((Path(folder) / "times.json").read_text())
