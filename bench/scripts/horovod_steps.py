"""Measures blocks of `hvd.DistributedOptimizer` and of DistributedDataParallel steps alternately, on equal models."""

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.models import MLP, LeNet, loss_of, random_batch
from bench.pairs import measure

MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": MLP, "lenet": LeNet}

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=sorted(MODELS))
parser.add_argument("--pairs", type=int, default=15)
parser.add_argument("--steps", type=int, default=10)
arguments = parser.parse_args()

dist.init_process_group("gloo")
hvd.init()
torch.manual_seed(0)
model = MODELS[arguments.model]()
# The default group may be another one of Rankless.
parallel = DistributedDataParallel(copy.deepcopy(model), process_group=dist.new_group(backend="gloo"))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
parallel_optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
inputs, targets = (tensor.chunk(hvd.size())[hvd.rank()].clone() for tensor in random_batch(arguments.model))


def step_of(trained: nn.Module, stepped: torch.optim.Optimizer) -> Callable[[], float]:
    def measured() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(arguments.steps):
            stepped.zero_grad()
            loss_of(trained, inputs, targets).backward()
            stepped.step()
        return (time.perf_counter() - start) / arguments.steps

    return measured


times = measure(step_of(model, optimizer), step_of(parallel, parallel_optimizer), pairs=arguments.pairs)
if hvd.rank() == 0:
    Path("times.json").write_text(json.dumps(times))
hvd.shutdown()
dist.destroy_process_group()
