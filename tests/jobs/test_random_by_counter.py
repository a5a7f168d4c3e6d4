"""A job with `random="counter"`: the same numbers on one device and on any number of workers."""

import re

import pytest
import torch
import torch.nn.functional as F
from support.devices import get_random_state
from support.processes import on_mesh
from support.verify_output import read_verdict
from support.warm_runs import rankless as run_command
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankless
from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh

pytestmark = pytest.mark.usefixtures("one_thread")


class NoisyNetwork(nn.Module):
    """Dropout in the middle and inside attention, noise, and a pass that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = checkpoint(lambda value: F.dropout(value, 0.4).tanh(), hidden, use_reentrant=False)
        return self.head(hidden + 0.1 * torch.randn(x.shape[0], 1, 8, dtype=x.dtype))


def train(mesh: Mesh, captures: bool = True, accumulate: int = 1) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Return results, the generator's state and the parameters of a training."""
    torch.manual_seed(0)
    model = NoisyNetwork().double()
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)

    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output = model(x)
        mask = F.dropout(torch.ones_like(x), 0.5)
        return output.square().mean(), mask, torch.rand(3)

    job = make_job(
        step,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        view=None if captures else "whole",
        world=lambda: world,
        step_options=StepOptions(accumulate=accumulate),
    ).configure({}, random="counter")
    results: list[Tensor] = []
    for rows in (7, 7, 5, 6):
        results += job(torch.linspace(-1, 1, rows * 12, dtype=torch.float64).view(rows, 4, 3))
    return results, get_random_state(), [item.detach() for item in model.parameters()]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("workers", "captures", "accumulate"), [(2, True, 1), (3, True, 1), (4, True, 1), (2, False, 1), (3, True, 2)]
)
def test_workers_draw_the_numbers_of_one_device(workers, captures, accumulate):
    wanted, state, parameters = train(Mesh.solo(), captures, accumulate)
    for found, found_state, found_parameters in on_mesh(workers, train, captures, accumulate):
        assert torch.equal(found_state, state)
        for number, (ours, plain) in enumerate(zip(found, wanted, strict=True)):
            if number % 3:
                assert torch.equal(ours, plain), f"result {number} is random and must be equal bit for bit"
            else:
                torch.testing.assert_close(ours, plain, rtol=1e-12, atol=0)
        for ours, plain in zip(found_parameters, parameters, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-13)
    masks = wanted[1::3]
    assert not torch.equal(masks[0], masks[1]), "two calls drew the same numbers"
    assert not torch.equal(masks[0], torch.zeros_like(masks[0]))


def draw_two_tensors(seed: int, random: str, *, draws: int) -> tuple[Tensor, Tensor]:
    """Return what a job draws, and the number that the generator gives next."""
    job = rankless.job(model=nn.Linear(1, 1), random=random)(lambda: sum(torch.rand(3) for _ in range(draws)))
    torch.manual_seed(seed)
    return job(), torch.rand(())


def test_the_generator_advances_by_one_draw_of_a_seed_per_call():
    torch.manual_seed(7)
    torch.empty((), dtype=torch.int64).random_()
    wanted = torch.rand(())
    for draws in (1, 5):
        assert torch.equal(draw_two_tensors(7, "counter", draws=draws)[1], wanted)
    assert not torch.equal(draw_two_tensors(7, "generator", draws=5)[1], wanted)


def test_the_seed_decides_the_numbers_which_are_not_those_of_the_generator():
    first, _ = draw_two_tensors(7, "counter", draws=1)
    assert torch.equal(first, draw_two_tensors(7, "counter", draws=1)[0])
    assert not torch.equal(first, draw_two_tensors(8, "counter", draws=1)[0])
    torch.manual_seed(7)
    assert torch.equal(draw_two_tensors(7, "generator", draws=1)[0], draw_two_tensors(7, "generator", draws=1)[0])
    assert not torch.equal(first, draw_two_tensors(7, "generator", draws=1)[0])


def test_a_job_that_raises_leaves_the_generator_advanced_by_one_draw():
    torch.manual_seed(7)
    torch.empty((), dtype=torch.int64).random_()
    wanted = torch.rand(())

    @rankless.job(model=nn.Linear(1, 1), random="counter")
    def fails():
        torch.rand(5)
        raise ValueError("the script's own error")

    torch.manual_seed(7)
    with pytest.raises(ValueError, match="the script's own error"):
        fails()
    assert torch.equal(torch.rand(()), wanted)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [({"random": "philox"}, "random='philox'"), ({"random": "counter", "view": "mirrored"}, "in the mirrored view")],
)
def test_an_unknown_source_and_the_mirrored_view_are_refused(arguments, found):
    with pytest.raises(ConfigError, match=re.escape(found)):
        rankless.job(model=nn.Linear(1, 1), **arguments)(lambda x: x)


SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn

import rankless

model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
features, labels = torch.rand(40, 6), torch.randint(3, (40,))


@rankless.job(model=model, optimizer=optimizer, random="counter")
def train(features, labels):
    noisy = features + 0.1 * torch.randn_like(features)
    return F.cross_entropy(model(noisy), labels)


for batch in rankless.loader(torch.utils.data.TensorDataset(features, labels), batch_size=10, shuffle=True):
    print(train(*batch).item())
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_verify_finds_the_same_training(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    job = run_command("verify", "-n", "3", "--devices", "cpu", "train.py", folder=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    assert read_verdict(job.stdout).startswith("same training: ")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_verify_names_the_first_value_that_differs(tmp_path):
    """The values of two runs are compared although a draw by counter is there in the placement of its use only."""
    broken = SCRIPT.replace("    return F.cross", "    noisy = noisy * (1 + rankless.rank())\n    return F.cross")
    broken = broken.replace("rankless.rank()", "float(rankless.world_size() > 1)")
    (tmp_path / "train.py").write_text(broken)
    job = run_command("verify", "-n", "2", "--devices", "cpu", "train.py", folder=tmp_path)
    assert job.returncode == 1, job.stdout + job.stderr
    assert "train.py:16" in job.stdout
