"""Measures blocks of job steps on an axis `tensor` and of PyTorch's tensor parallelism alternately, on equal models.

The peer has a Gloo group, as under torchrun, and the styles that PyTorch's tutorial gives to a transformer: columns of
queries, keys, values and of the first feed-forward layer, rows of what follows them, and a loss on divided characters.
"""

import argparse
import contextlib
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import rankless
from bench.alternating import write_times
from bench.models import GPT, MLP, SplitGPT, loss_of, random_batch


def plan_styles(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the style of each divided layer of the peer's model."""
    if isinstance(model, GPT):
        styles: dict[str, ParallelStyle] = {
            "characters": RowwiseParallel(input_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        for number in range(len(model.blocks)):
            for name in ("query", "key", "value", "feed.0"):
                styles[f"blocks.{number}.{name}"] = ColwiseParallel()
            for name in ("projection", "feed.2"):
                styles[f"blocks.{number}.{name}"] = RowwiseParallel()
        return styles
    layers = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    return {name: (RowwiseParallel() if number % 2 else ColwiseParallel()) for number, name in enumerate(layers[:-1])}


parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["gpt", "mlp"])
parser.add_argument("--pairs", type=int, default=15)
parser.add_argument("--steps", type=int, default=10)
arguments = parser.parse_args()

torch.manual_seed(0)
assert rankless.world_size() == 2
model = {"gpt": SplitGPT, "mlp": MLP}[arguments.model]()
gloo = dist.new_group(backend="gloo")
mesh = DeviceMesh.from_group(gloo, "cpu")
peer = copy.deepcopy(model)
parallelize_module(peer, mesh, plan_styles(peer))
divides_loss = arguments.model == "gpt"
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
peer_optimizer = torch.optim.SGD(peer.parameters(), lr=0.01)
inputs, targets = random_batch(arguments.model)


@rankless.job(model=model, optimizer=optimizer)
def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return loss_of(model, inputs, targets)


def peer_step() -> None:
    peer_optimizer.zero_grad()
    with loss_parallel() if divides_loss else contextlib.nullcontext():
        F.cross_entropy(peer(inputs).flatten(0, -2), targets.flatten()).backward()
    peer_optimizer.step()


def job_step() -> None:
    train(inputs, targets)


write_times(job_step, peer_step, pairs=arguments.pairs, calls=arguments.steps, warmup=3)
