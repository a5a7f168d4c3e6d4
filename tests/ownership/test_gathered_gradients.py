"""Gradients that workers have in pieces are gathered after a step only for a participant that compares values."""

from unittest.mock import patch

import pytest
import torch
from support.grid_jobs import make_grid_job
from support.processes import on_mesh
from torch import nn

from rankless.context.step_events import StepEvents, StepParticipant
from rankless.ownership.sharded_state_owner import ShardedStateOwner
from rankless.parallel.mesh import Mesh


class Comparing(StepParticipant):
    """Sees the gradients at the end of a step."""

    def __init__(self, model: nn.Module, compares: bool) -> None:
        self._model, self._compares = model, compares
        self.seen: list[list[float] | None] = []

    @property
    def compares_values(self) -> bool:
        return self._compares

    def end_step(self, _job: object) -> None:
        gradients = [parameter.grad for parameter in self._model.parameters()]
        self.seen += [None if gradient is None else gradient.flatten().tolist() for gradient in gradients]


def step(mesh: Mesh, compares: bool) -> tuple[int, list[list[float] | None]]:
    """Return how many gradients a step gathers, and those that a participant sees."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    participant = Comparing(model, compares)
    job, _ = make_grid_job(
        lambda rows: model(rows).square().mean(),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        mesh,
        {"data": 2},
        zero="gradients",
        events=StepEvents([participant]),
    )
    gather = ShardedStateOwner.gather_gradient
    with patch.object(ShardedStateOwner, "gather_gradient", autospec=True, side_effect=gather) as gathered:
        job(torch.arange(12.0).double().reshape(4, 3))
    return gathered.call_count, participant.seen


@pytest.mark.parametrize("compares", [False, True])
def test_a_step_gathers_gradients_only_for_a_participant_that_compares(compares: bool):
    _, wanted = step(Mesh.solo(), compares)
    for count, seen in on_mesh(2, step, compares):
        assert count == (2 if compares else 0)
        if compares:
            assert [pytest.approx(each) for each in wanted] == seen
        else:
            assert seen == [None, None]
