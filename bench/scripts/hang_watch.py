"""Measures the watchdog's hook after every optimizer step, and the whole step of a small model."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch.optim import optimizer as optimizers

parser = argparse.ArgumentParser()
parser.add_argument("--pairs", type=int, default=15)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--calls", type=int, default=10_000)
arguments = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(32, 64)
(hook,) = optimizers._global_optimizer_post_hooks.values()


def hook_seconds() -> float:
    start = time.perf_counter()
    for _ in range(arguments.calls):
        hook(optimizer, (), {})
    return (time.perf_counter() - start) / arguments.calls


def step_seconds() -> float:
    start = time.perf_counter()
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - start) / arguments.steps


step_seconds()
times = [(hook_seconds(), step_seconds()) for _ in range(arguments.pairs)]
if os.environ["RANK"] == "0":
    Path("times.json").write_text(json.dumps(times))
