"""Jobs that draw from generators of the script: the numbers of the plain script on every rank, or a refusal."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.processes import on_mesh
from torch import nn

from rankless.collectives.desync_detection import DesyncDetector
from rankless.context.world import World
from rankless.data.logical_tensor import GatherMonitor, LogicalTensor
from rankless.errors import RanksDiverged
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.tensor_placement import Shard, split_lengths

pytestmark = pytest.mark.usefixtures("one_thread")


def make_parts(seed=5):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.Generator(torch.get_default_device()).manual_seed(seed),
    )


def compute_loss(model, generator, features):
    noise = torch.empty_like(features).normal_(0, 0.5, generator=generator)
    kept = torch.rand(features.shape[0], 1, generator=generator, dtype=features.dtype) > 0.2
    return (F.dropout(model(features + noise), 0.3) * kept).square().mean()


def make_batches(count=6):
    source = torch.Generator(torch.get_default_device()).manual_seed(8)
    return [torch.randn(7, 3, generator=source, dtype=torch.float64) for _ in range(count)]


def run_plain(accumulate=1):
    model, optimizer, generator = make_parts()
    losses = []
    for number, batch in enumerate(make_batches()):
        loss = compute_loss(model, generator, batch)
        (loss / accumulate).backward()
        losses.append(loss.detach())
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict(), generator.get_state()


def split(batch, mesh):
    placement = Shard(0, split_lengths(len(batch), mesh.size))
    local = batch.narrow(0, placement.start(mesh.rank), placement.lengths[mesh.rank]).clone()
    return LogicalTensor(local, placement=placement, mesh=mesh, monitor=GatherMonitor(print))


def train(mesh, accumulate=1, seed_step=0, moved_rank=None):
    model, optimizer, generator = make_parts(5 + seed_step * mesh.rank)
    compared = replace(mesh, desync_detector=DesyncDetector(mesh, notify=print))
    world = World(mesh=compared, notify=print, send_record=lambda _: None)
    options = {"accumulate": accumulate} if accumulate > 1 else {}
    job = make_job(
        lambda features: compute_loss(model, generator, features),
        model=model,
        optimizer=optimizer,
        view=None,
        world=lambda: world,
        step_options=StepOptions(**options),
    )
    losses = []
    for number, batch in enumerate(make_batches()):
        if moved_rank == mesh.rank and number == 3:
            torch.rand(1, generator=generator)
        losses.append(job(split(batch, mesh)))
    return losses, model.state_dict(), generator.get_state()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.ci_sample(2)
def test_the_numbers_are_those_of_the_plain_script_on_every_rank(size: int, accumulate: int):
    losses, state, generator = run_plain(accumulate)
    for found, found_state, found_generator in on_mesh(size, train, accumulate):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(found_state[name], value, rtol=1e-12, atol=1e-12)
        assert torch.equal(found_generator, generator)


def test_other_seeds_on_the_ranks_are_found_before_the_first_step():
    with pytest.raises(RanksDiverged, match="generators of the script") as raised:
        on_mesh(2, train, 1, 1)
    assert "test_generators.py" in str(raised.value.where)


def test_a_generator_that_moves_on_one_rank_is_found_at_the_next_call():
    with pytest.raises(RanksDiverged, match="state of generator 0 of the script"):
        on_mesh(2, train, 1, 0, 1)
