"""Measures calls of a job with many parameters, and within them its program and its optimizer's step."""

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rankless
from bench.models import ManyParameters
from rankless.compiler.local_program import LocalProgram

BLOCKS = 15
STEPS = 10

torch.manual_seed(0)
model = ManyParameters()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(8, 4)
inside = 0.0


@rankless.job(model=model, optimizer=optimizer)
def train(batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def measured(function: Any) -> Any:
    """Return the same function, whose time counts as inside."""

    def call(*args: Any, **kwargs: Any) -> Any:
        global inside
        start = time.perf_counter()
        result = function(*args, **kwargs)
        inside += time.perf_counter() - start
        return result

    return call


train(batch)
LocalProgram.__call__ = measured(LocalProgram.__call__)  # type: ignore[method-assign]
optimizer.step = measured(optimizer.step)  # type: ignore[method-assign]
times = []
for _ in range(BLOCKS):
    dist.barrier()
    inside = 0.0
    begin = time.perf_counter()
    for _ in range(STEPS):
        train(batch)
    times.append(((time.perf_counter() - begin) / STEPS, inside / STEPS))
if rankless.rank() == 0:
    count = len(list(model.parameters()))
    Path("times.json").write_text(json.dumps({"parameters": count, "times": times}))
