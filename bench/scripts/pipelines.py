"""Measures blocks of job steps in a pipeline and of `torch.distributed.pipelining` alternately, on equal models.

The peer has a Gloo group, as under torchrun, and its stages are cut where ours are.
"""

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import rankless
from bench.alternating import write_times
from bench.models import GPT, MLP, loss_of, random_batch

MICROBATCHES = 4


class FirstHalf(nn.Module):
    """The embeddings of a GPT and its first blocks."""

    def __init__(self, model: GPT, blocks: int) -> None:
        super().__init__()
        self.characters, self.positions, self.blocks = model.characters, model.positions, model.blocks[:blocks]

    def forward(self, text: Tensor) -> Tensor:
        hidden: Tensor = self.characters(text) + self.positions(torch.arange(text.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def halve(model: nn.Module, rank: int) -> nn.Module:
    """Return the layers of a model that one of two workers has."""
    if isinstance(model, GPT):
        count = len(model.blocks) // 2
        return nn.Sequential(*model.blocks[count:], model.norm, model.output) if rank else FirstHalf(model, count)
    layers = list(model.children())
    return nn.Sequential(*(layers[12:] if rank else layers[:12]))


def flat_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of a microbatch."""
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten())


parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["gpt", "mlp"])
parser.add_argument("schedule", choices=["gpipe", "1f1b"])
parser.add_argument("--pairs", type=int, default=15)
parser.add_argument("--steps", type=int, default=10)
arguments = parser.parse_args()

torch.manual_seed(0)
rank, size = rankless.rank(), rankless.world_size()
model = {"gpt": GPT, "mlp": MLP}[arguments.model]()
gloo = dist.new_group(backend="gloo")
half = halve(copy.deepcopy(model), rank)
stage = PipelineStage(half, rank, size, torch.device("cpu"), group=gloo)
kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
pipeline = kinds[arguments.schedule](stage, MICROBATCHES, loss_fn=flat_loss)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
half_optimizer = torch.optim.SGD(half.parameters(), lr=0.01)
inputs, targets = random_batch(arguments.model)
border = {"gpt": "model.blocks.2", "mlp": "model.12"}[arguments.model]
plan = rankless.Plan(schedule=arguments.schedule, microbatches=MICROBATCHES, stages=(border,))


@rankless.job(model=model, optimizer=optimizer, plan=plan)
def train(inputs: Tensor, targets: Tensor) -> Tensor:
    return loss_of(model, inputs, targets)


def pipeline_step() -> None:
    half_optimizer.zero_grad()
    if rank == 0:
        pipeline.step(inputs)
    else:
        pipeline.step(target=targets, losses=[])
    half_optimizer.step()


def job_step() -> None:
    train(inputs, targets)


write_times(job_step, pipeline_step, pairs=arguments.pairs, calls=arguments.steps, warmup=3)
