"""Measures blocks of steps in the logical view and of steps of a job or of DistributedDataParallel alternately.

The models and batches are equal. DistributedDataParallel has a Gloo group, as under torchrun.
"""

import argparse
import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankless
from bench.alternating import write_times
from bench.models import BERT, GPT, MLP, ResNet, loss_of, random_batch
from rankless.api import _world
from rankless.logical_view import function_handlers  # noqa: F401  # registers what tensors answer
from rankless.logical_view.gradients import LogicalBackward
from rankless.logical_view.tensor import LogicalView, shard_rows

MODELS = {"mlp": MLP, "gpt": GPT, "bert": BERT, "resnet": ResNet}

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=sorted(MODELS))
parser.add_argument("peer", choices=["job", "ddp"])
parser.add_argument("--pairs", type=int, default=15)
parser.add_argument("--steps", type=int, default=5)
arguments = parser.parse_args()

torch.manual_seed(0)
world = _world()
rank, size = rankless.rank(), rankless.world_size()
model: nn.Module = MODELS[arguments.model]()
other: nn.Module = copy.deepcopy(model)
if arguments.peer == "ddp":
    other = DistributedDataParallel(other, process_group=dist.new_group(backend="gloo"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
other_optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
inputs, targets = random_batch(arguments.model)
own_inputs, own_targets = inputs.chunk(size)[rank].clone(), targets.chunk(size)[rank].clone()
view = LogicalView(world.mesh, world.notify)
backward = LogicalBackward(view)
lengths = (len(own_inputs),) * size


def logical_step() -> None:
    with backward.install():
        optimizer.zero_grad()
        loss_of(model, shard_rows(own_inputs, lengths, view), shard_rows(own_targets, lengths, view)).backward()
        optimizer.step()


def parallel_step() -> None:
    other_optimizer.zero_grad()
    loss_of(other, own_inputs, own_targets).backward()
    other_optimizer.step()


def make_job_step() -> Callable[[], object]:
    """Return the step of a job."""

    @rankless.job(model=other, optimizer=other_optimizer)
    def train(inputs: Tensor, targets: Tensor) -> Tensor:
        return loss_of(other, inputs, targets)

    return lambda: train(inputs, targets)


peer_step = parallel_step if arguments.peer == "ddp" else make_job_step()
write_times(logical_step, peer_step, pairs=arguments.pairs, calls=arguments.steps, warmup=3)
