"""Measures the seconds per step of each call's checks, and of the whole step, in blocks of steps."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rankless
from bench.models import GPT, MLP, LeNet, loss_of, random_batch
from rankless.compiler.guards.guards import GuardSet
from rankless.context.all_or_nothing_operations import Operations
from rankless.context.changes_outside_jobs import ModelChangeDetector
from rankless.jobs.views.captured import ConsistentView
from rankless.parallel.mesh import Mesh

MODELS = {"mlp": MLP, "lenet": LeNet, "gpt": GPT}
CHECKS: dict[str, list[tuple[type, str]]] = {
    "digest": [(ConsistentView, "_sync_call"), (ModelChangeDetector, "record_versions")],
    "guards": [(GuardSet, "all_hold")],
    "failures": [],
}


class Stopwatch:
    """Adds up the seconds of all calls of some methods."""

    def __init__(self, methods: list[tuple[type, str]]) -> None:
        self.seconds = 0.0
        for owner, name in methods:
            setattr(owner, name, self.wrap(getattr(owner, name)))

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return call


parser = argparse.ArgumentParser()
parser.add_argument("model", choices=sorted(MODELS))
parser.add_argument("check", choices=sorted(CHECKS))
parser.add_argument("--blocks", type=int, default=15)
parser.add_argument("--steps", type=int, default=10)
arguments = parser.parse_args()

stopwatch = Stopwatch(CHECKS[arguments.check])
torch.manual_seed(0)
rankless.rank()  # joins the other ranks
model = MODELS[arguments.model]()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, targets = random_batch(arguments.model)


@rankless.job(model=model, optimizer=optimizer)
def train(inputs: Tensor, targets: Tensor) -> Tensor:
    return loss_of(model, inputs, targets)


def count_empty_call(operations: Operations, mesh: Mesh) -> None:
    """Make what a call does for its all-or-none, around nothing: see `Job.__call__`."""
    with operations.prepare(mesh):
        pass
    operations.run(lambda: mesh, lambda: None)
    for _ in range(2):
        with operations.change(mesh):
            pass


def measure_empty_calls() -> float:
    """Return the seconds of the empty calls of a block."""
    operations, mesh = Operations(), train._world().mesh
    start = time.perf_counter()
    for _ in range(arguments.steps):
        count_empty_call(operations, mesh)
    return time.perf_counter() - start


def measure_block() -> tuple[float, float]:
    dist.barrier()
    before, start = stopwatch.seconds, time.perf_counter()
    for _ in range(arguments.steps):
        train(inputs, targets)
    whole = (time.perf_counter() - start) / arguments.steps
    seconds = measure_empty_calls() if arguments.check == "failures" else stopwatch.seconds - before
    return seconds / arguments.steps, whole


measure_block()
times = [measure_block() for _ in range(arguments.blocks)]
if rankless.rank() == 0:
    Path("times.json").write_text(json.dumps(times))
