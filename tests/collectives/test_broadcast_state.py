"""A model and an optimizer are broadcast to all ranks, and compared between ranks."""

import copy
from typing import Any

import pytest
import torch
from support.processes import on_mesh
from torch import nn

import rankless.collectives as collectives
from rankless.collectives.broadcast_and_compare_state import named_tensors, require_synchronized
from rankless.errors import ConfigError, RanksDiverged
from rankless.parallel.mesh import Mesh


class Net(nn.Module):
    def __init__(self, seed: int, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("nothing", torch.zeros(0))


def stepped(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + steps))
    for _ in range(steps):
        model.norm(model.first(torch.randn(5, 4))).square().sum().backward()
        optimizer.step()
    return optimizer


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def broadcast_and_compare(mesh: Mesh, root: int, way: str) -> Any:
    """Broadcast one rank's model and optimizer state; return this rank's states before and after."""
    model = Net(mesh.rank)
    optimizer = stepped(model, 2 if mesh.rank == root else 0)
    before = states(model, optimizer)
    with pytest.raises(RanksDiverged, match=r"first\.weight"):
        require_synchronized(model, optimizer)
    if way == "named_parameters":
        collectives.broadcast_parameters(model.named_buffers(), root)
        collectives.broadcast_parameters(model.named_parameters(), root)
    else:
        collectives.broadcast_parameters(model if way == "module" else model.state_dict(), root)
    collectives.broadcast_optimizer_state(optimizer, root)
    require_synchronized(model, optimizer)
    return before, states(model, optimizer)


@pytest.mark.parametrize("way", ["module", "state_dict", "named_parameters"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_receive_the_root_ranks_model_and_optimizer(size: int, way: str):
    answers = on_mesh(size, broadcast_and_compare, 1, way)
    wanted, wanted_state = answers[1][0]
    assert wanted_state["state"][0]["step"] == 2
    for _, (found, state) in answers:
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        assert state["param_groups"] == wanted_state["param_groups"]
        assert all(
            torch.equal(state["state"][number][name], value)
            for number, values in wanted_state["state"].items()
            for name, value in values.items()
        )


def other_shapes(mesh: Mesh) -> None:
    collectives.broadcast_parameters(Net(0, width=3 + mesh.rank))


def other_rate(mesh: Mesh) -> None:
    model = Net(0)
    require_synchronized(model, torch.optim.SGD(model.parameters(), lr=0.1 * (1 + (mesh.rank == 2))))


def test_the_error_names_each_difference_with_its_ranks():
    with pytest.raises(RanksDiverged, match=r"first\.weight \(rank 1\)"):
        on_mesh(2, other_shapes)
    with pytest.raises(RanksDiverged, match=r"optimizer\['param_groups'\]\[0\]\['lr'\] \(rank 2\)"):
        on_mesh(3, other_rate)


def test_parameters_without_names_raise():
    with pytest.raises(ConfigError, match="state_dict"):
        named_tensors([torch.ones(3)])
