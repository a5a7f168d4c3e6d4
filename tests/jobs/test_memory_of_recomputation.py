"""Values that are computed again take no memory between the forward and the backward pass."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support.metered_calls import MeteredCalls
from support.processes import on_mesh
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bench.models import CHARACTERS, CONTEXT, GPT
from rankless.context.world import RunSettings, World
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions

LAYERS = 12
MOST = 0.3
"""The part of the activations of a GPT with twelve layers that may remain."""


def measure(mesh, make_training, recompute, zero):
    """Return the peak of this worker's program at the third call, and its collectives."""
    torch.manual_seed(0)
    model, loss, batch = make_training()
    meter = MeteredCalls()
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None, settings=RunSettings(programs=meter))
    job = make_job(
        loss,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        view=None,
        world=lambda: world,
        step_options=StepOptions(zero=zero),
    ).configure({}, recompute=recompute)
    for _ in range(3):
        job(*batch)
    return meter.peaks[-1], meter.collectives


def get_peak(make_training, recompute=None, zero=None):
    return max(peak for peak, _ in on_mesh(2, measure, make_training, recompute, zero))


def make_gpt(dropout, run_blocks=None):
    model = GPT(layers=LAYERS, width=64, dropout=dropout)
    if run_blocks is not None:
        model.blocks.forward = functools.partial(run_blocks, model.blocks)
    batch = torch.randint(0, CHARACTERS, (16, CONTEXT))
    return model, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), (batch, batch)


def run_checkpoints(blocks, x):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def run_selective_checkpoints(blocks, x):
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.rankless.linear.default])
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return x


def run_one_block(blocks, x):
    for _ in blocks:
        x = blocks[0](x)
    return x


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [None, "parameters"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_blocks_of_a_gpt_keep_less_than_a_third(dropout, zero):
    make = functools.partial(make_gpt, dropout)
    assert get_peak(make, "blocks", zero) <= MOST * get_peak(make, None, zero)


@pytest.mark.exhaustive
@pytest.mark.parametrize("run_blocks", [run_checkpoints, run_one_block])
def test_checkpoints_of_the_script_and_calls_of_one_block_keep_less_than_a_third(run_blocks):
    recompute = None if run_blocks is run_checkpoints else "blocks"
    peak = get_peak(functools.partial(make_gpt, 0.1, run_blocks), recompute)
    assert peak <= MOST * get_peak(functools.partial(make_gpt, 0.1))


@pytest.mark.exhaustive
def test_a_fraction_and_a_selective_checkpoint_keep_something_in_between():
    make = functools.partial(make_gpt, 0.0)
    nothing, everything = get_peak(make), get_peak(make, "blocks")
    half = get_peak(make, 0.5)
    assert everything + 0.3 * (nothing - everything) < half < everything + 0.7 * (nothing - everything)
    selective = get_peak(functools.partial(make_gpt, 0.0, run_selective_checkpoints))
    assert everything < selective < nothing


def make_plain_network():
    layers = [part for _ in range(36) for part in (nn.Linear(64, 64), nn.Tanh(), nn.Sigmoid())]
    model = nn.Sequential(*layers)
    return model, lambda x: model(x).square().mean(), (torch.randn(2048, 64),)


@pytest.mark.exhaustive
def test_a_network_without_blocks_is_cut_into_sections():
    assert get_peak(make_plain_network, "blocks") <= 0.4 * get_peak(make_plain_network)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last_norm = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu(x + self.last_norm(self.second(F.relu(self.norm(self.first(x))))))


def make_residual_network():
    model = nn.Sequential(*(nn.Sequential(*(Residual() for _ in range(4))) for _ in range(4)))
    return model, lambda x: model(x).square().mean(), (torch.randn(8, 8, 16, 16),)


@pytest.mark.exhaustive
def test_blocks_with_batch_norm_are_computed_again_without_their_collectives():
    (plain, sent), (peak, sent_again) = (
        on_mesh(2, measure, make_residual_network, recompute, None)[0] for recompute in (None, "blocks")
    )
    assert peak <= 0.5 * plain
    assert sent_again == sent
    assert sum(kind == "all_gather" for kind, *_ in sent) == 2 * 16
