"""Measures blocks of job steps and of steps of DistributedDataParallel or FSDP2 alternately, on equal models.

The peers have a Gloo group, as under torchrun.
"""

import argparse
import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankless
from bench.alternating import write_times
from bench.models import GPT, MLP, Attention, Block, LargeMLP, LeNet, Transformer, loss_of, random_batch

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "mlp_100_mb": LargeMLP,
    "mlp_dropout": lambda: MLP(dropout=0.1),
    "lenet": LeNet,
    "lenet_norm": lambda: LeNet(norm=True),
    "gpt": GPT,
    "attention": Attention,
    "transformer": Transformer,
    "gpt_dropout": lambda: GPT(dropout=0.1),
}


def shard(model: nn.Module) -> nn.Module:
    """Return a model whose blocks, or whose layers if it has none, FSDP2 divides, as its tutorial does."""
    mesh = DeviceMesh.from_group(gloo, "cpu")
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for module in blocks or [module for module in model.modules() if isinstance(module, nn.Linear)]:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


parser = argparse.ArgumentParser()
parser.add_argument("model", choices=sorted(MODELS))
parser.add_argument("--pairs", type=int, default=15)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--zero", choices=["parameters"], help="divide the parameters, and compare with FSDP2")
arguments = parser.parse_args()

torch.manual_seed(0)
rank, size = rankless.rank(), rankless.world_size()
model = MODELS[arguments.model]()
gloo = dist.new_group(backend="gloo")
copied = copy.deepcopy(model)
parallel = shard(copied) if arguments.zero else DistributedDataParallel(copied, process_group=gloo)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
parallel_optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
inputs, targets = random_batch(arguments.model)
own_inputs, own_targets = inputs.chunk(size)[rank].clone(), targets.chunk(size)[rank].clone()


@rankless.job(model=model, optimizer=optimizer, zero=arguments.zero)
def train(inputs: Tensor, targets: Tensor) -> Tensor:
    return loss_of(model, inputs, targets)


def parallel_step() -> None:
    parallel_optimizer.zero_grad()
    loss_of(parallel, own_inputs, own_targets).backward()
    parallel_optimizer.step()


def job_step() -> None:
    train(inputs, targets)


write_times(job_step, parallel_step, pairs=arguments.pairs, calls=arguments.steps, warmup=3)
