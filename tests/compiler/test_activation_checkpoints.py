"""Activation checkpoints in a job have the gradients of the plain script, which calls `backward()`."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from simulated_ranks import run_on_simulated_ranks
from support.devices import get_random_state
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from rankless.errors import CaptureError


class Blocks(nn.Module):
    """Blocks with dropout and layer norm, each a reentrant checkpoint."""

    def __init__(self, dropout: float = 0.4) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.last = nn.Linear(6, 3)

    def forward(self, rows):
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        return self.last(hidden)


def nested(model, rows):
    def outer(value):
        return checkpoint(lambda inner: model.blocks[0](inner), value, use_reentrant=True).sin()

    return model.last(checkpoint(outer, model.first(rows), use_reentrant=True))


def without_gradient_to_the_input(model, rows):
    """The parameters of the checkpoint get no gradient: PyTorch warns."""
    return model.last(model.first(rows) + checkpoint(model.first, rows, use_reentrant=True))


def several_results(model, rows):
    def split(value, scale):
        return value[:, :3] * scale, value[:, 3:].cos(), scale

    one, other, _ = checkpoint(split, model.first(rows), 3.0, use_reentrant=True)
    return model.last(torch.cat([one, other], 1))


def without_kept_draws(model, rows):
    hidden = checkpoint(F.tanh, model.first(rows), use_reentrant=True, preserve_rng_state=False)
    return model.last(hidden)


def sequential(model, rows):
    return model.last(checkpoint_sequential(model.blocks, 2, model.first(rows), use_reentrant=True))


FORMS = {
    "blocks": lambda model, rows: model(rows),
    "nested": nested,
    "without gradient to the input": without_gradient_to_the_input,
    "several results": several_results,
    "without kept draws": without_kept_draws,
    "sequential": sequential,
}


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_is_exact(form: str, ranks: int):
    torch.manual_seed(4)
    plain = Blocks().double()
    model = copy.deepcopy(plain)
    rows, labels = torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 3, (8,))

    def loss(features, targets):
        return F.cross_entropy(FORMS[form](model, features), targets)

    torch.manual_seed(9)
    wanted = F.cross_entropy(FORMS[form](plain, rows), labels)
    wanted.backward()
    after = get_random_state()
    torch.manual_seed(9)
    found = run_on_simulated_ranks(loss, {"model": model}, [rows, labels], ranks)
    assert torch.equal(get_random_state(), after)
    torch.testing.assert_close(found.results[0], wanted.detach(), rtol=1e-12, atol=1e-12)
    for name, parameter in plain.named_parameters():
        gradient = found.gradients.get(f"model.{name}")
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-11, atol=1e-13)
    for name, buffer in plain.named_buffers():
        changed = found.mutations.get(f"model.{name}", dict(model.named_buffers())[name])
        torch.testing.assert_close(changed, buffer, rtol=1e-12, atol=1e-12)


def batch_norm_in_a_checkpoint(use_reentrant: bool):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()

    def loss(rows):
        return checkpoint(model[1], model[0](rows), use_reentrant=use_reentrant).sin().sum()  # the line

    return model, loss, torch.randn(8, 4, dtype=torch.float64)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_that_changes_buffers_is_refused_with_its_line(use_reentrant: bool):
    """On one device PyTorch changes the running statistics twice. A program would change them once."""
    model, loss, rows = batch_norm_in_a_checkpoint(use_reentrant)
    with pytest.raises(CaptureError, match=r"'model.1.running_mean' and 2 more, which PyTorch changes twice") as raised:
        run_on_simulated_ranks(loss, {"model": model}, [rows], 2)
    assert raised.value.where.endswith(f":{find_line(loss)}")
    loss(rows).backward()
    assert model[1].num_batches_tracked == 2


def find_line(function) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if "# the line" in line)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_batch_norm_in_a_checkpoint_is_exact_in_evaluation(use_reentrant: bool):
    model, loss, rows = batch_norm_in_a_checkpoint(use_reentrant)
    model.eval()
    loss(rows).backward()
    found = run_on_simulated_ranks(loss, {"model": model}, [rows], 2)
    torch.testing.assert_close(found.gradients["model.0.weight"], model[0].weight.grad, rtol=1e-12, atol=1e-12)


def test_a_checkpoint_in_a_job_that_predicts_may_change_buffers():
    model, loss, rows = batch_norm_in_a_checkpoint(use_reentrant=False)
    found = run_on_simulated_ranks(loss, {"model": model}, [rows], 2, trains=False)
    with torch.no_grad():
        loss(rows)
    torch.testing.assert_close(found.mutations["model.1.running_mean"], model[1].running_mean, rtol=1e-12, atol=1e-12)
