"""Ranks with different programs stop at once; differing models and missing rules warn once."""

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from support.processes import on_mesh
from torch import Tensor, nn

from rankless.context.world import World
from rankless.errors import ProgramMismatch
from rankless.jobs.job import Job, make_job
from rankless.parallel.mesh import Mesh
from rankless.user_code import display_name

pytestmark = pytest.mark.slow
WORKERS = 2
MARK = "# the line"


def marked_line(script: Callable[..., object]) -> str:
    lines, first = inspect.getsourcelines(script)
    (offset,) = (number for number, text in enumerate(lines) if MARK in text)
    return f"{display_name(inspect.getsourcefile(script))}:{first + offset}"


def model_of(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2).double()


def job_on(mesh: Mesh, model: nn.Module, function: Callable[..., Tensor], messages: list[str]) -> Job[..., Tensor]:
    world = World(mesh=mesh, notify=messages.append, send_record=lambda _: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_job(function, model=model, optimizer=optimizer, view="consistent", world=lambda: world)


def features() -> Tensor:
    return torch.arange(12, dtype=torch.float64).reshape(4, 3)


def branch_on_the_rank(mesh: Mesh, model: nn.Module) -> Callable[[Tensor], Tensor]:
    def loss(rows):
        scores = model(rows)
        if mesh.rank == 1:
            scores = scores.sin()  # the line
        return scores.mean()

    return loss


def another_constant(mesh: Mesh, model: nn.Module) -> Callable[[Tensor], Tensor]:
    factor = 2.0 + mesh.rank

    def loss(rows):
        scores = model(rows)
        scores = scores * factor  # the line
        return scores.mean()

    return loss


def another_tensor(mesh: Mesh, model: nn.Module) -> Callable[[Tensor], Tensor]:
    weights = torch.full((2,), 1.0 + mesh.rank, dtype=torch.float64)

    def loss(rows):
        scores = model(rows)
        return (scores * weights).mean()  # the line

    return loss


def another_order(mesh: Mesh, model: nn.Module) -> Callable[[Tensor], Tensor]:
    def loss(rows):
        scores = model(rows)
        for function in (torch.sin, torch.cos)[:: 1 if mesh.rank == 0 else -1]:
            scores = function(scores)  # the line
        return scores.mean()

    return loss


DIFFERENT = {
    branch_on_the_rank: "sin",
    another_constant: "3.0",
    another_tensor: "constant",
    another_order: "cos",
}


def capture_mismatch(mesh: Mesh, script: Callable[..., Callable[..., Tensor]]) -> tuple[str, str, str | None, bool]:
    """Return this rank's error, and whether its model is unchanged."""
    model = model_of(0)
    try:
        job_on(mesh, model, script(mesh, model), [])(features())
    except ProgramMismatch as error:
        unchanged = torch.equal(model.weight, model_of(0).weight)
        return str(error.expected), str(error.found), error.where, unchanged
    raise AssertionError("the ranks' programs differ, but no rank raised ProgramMismatch")


@pytest.mark.parametrize(("script", "difference"), DIFFERENT.items(), ids=lambda item: getattr(item, "__name__", item))
def test_ranks_with_different_programs_all_raise_the_first_difference_and_its_line(script, difference):
    results = on_mesh(WORKERS, capture_mismatch, script)
    assert results[0] == results[1]
    expected, found, where, unchanged = results[0]
    assert "on rank 1:" in found
    assert difference in found
    assert found.removeprefix("on rank 1: ") not in expected
    assert where == marked_line(script)
    assert unchanged


def train_different_models(mesh: Mesh) -> tuple[list[str], Tensor, Tensor]:
    """Return the messages, and weight and bias after two steps."""
    model, messages = model_of(mesh.rank), []
    job = job_on(mesh, model, lambda rows: model(rows).mean(), messages)
    job(features())
    job(features())
    return messages, model.weight.detach(), model.bias.detach()


def test_models_that_differ_at_the_first_call_become_rank_0s_with_one_warning():
    results = on_mesh(WORKERS, train_different_models)
    model = model_of(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(features()).mean().backward()
        optimizer.step()
    for messages, weight, bias in results:
        assert [text for text in messages if "differed between ranks at the first call" in text] == messages
        assert len(messages) == 1
        torch.testing.assert_close(weight, model.weight.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(bias, model.bias.detach(), rtol=1e-12, atol=1e-12)


def run_without_a_rule(mesh: Mesh) -> list[str]:
    model, messages = model_of(0), []

    def loss(rows):
        scores = model(rows)
        return (scores - scores.median()).square().mean()  # the line

    job = job_on(mesh, model, loss, messages)
    for _ in range(3):
        job(features())
    return messages


def test_an_operator_without_a_rule_warns_once_with_its_line():
    for messages in on_mesh(WORKERS, run_without_a_rule):
        warnings = [text for text in messages if "median" in text]
        assert len(warnings) == 1
        assert warnings[0].startswith(f"{marked_line(run_without_a_rule)}: job ")
        assert re.search(r"median gathers \d+ B per step: it has no sharding rule", warnings[0])
