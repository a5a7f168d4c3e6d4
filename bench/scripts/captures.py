"""Measures first calls of new jobs and of newly compiled training steps alternately, on equal models."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import rankless
from bench.models import GPT, loss_of, random_batch
from bench.pairs import measure

parser = argparse.ArgumentParser()
parser.add_argument("--pairs", type=int, default=4)
parser.add_argument("--layers", type=int, default=12)
arguments = parser.parse_args()

rankless.init()
torch.manual_seed(0)
inputs, targets = random_batch("gpt")
inputs, targets = inputs[:4], targets[:4]


def seconds_of(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def job_seconds() -> float:
    model = GPT(layers=arguments.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @rankless.job(model=model, optimizer=optimizer)
    def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(model, inputs, targets)

    return seconds_of(lambda: train(inputs, targets))


def compiled_seconds() -> float:
    model = GPT(layers=arguments.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(model, inputs, targets)

    def step() -> None:
        compute(inputs, targets).backward()
        optimizer.step()

    return seconds_of(step)


times = measure(job_seconds, compiled_seconds, pairs=arguments.pairs)  # the warm-up of both imports lazily
if rankless.rank() == 0:
    Path("times.json").write_text(json.dumps(times))
