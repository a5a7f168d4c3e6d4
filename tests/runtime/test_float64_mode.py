"""A run in float64 computes what the script computes, also where a kernel of PyTorch takes no float64."""

import pytest
import torch
import torch.nn.functional as F

from rankless.runtime.hooks.float64_mode import Float64Mode


def train_with_scaler(model: torch.nn.Module, initial_scale: float) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=initial_scale, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        rows = torch.ones(8, 6, dtype=torch.float32) * (step + 1) / 7
        optimizer.zero_grad()
        scaler.scale(model(rows).float().square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [item for parameter in model.parameters() for item in parameter.detach().flatten().tolist()]


@pytest.mark.parametrize("initial_scale", [2.0**16, 1.0])
def test_a_scaler_of_gradients_changes_nothing_in_float64(initial_scale: float):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 2)
    exact = torch.nn.Linear(6, 2).double()
    exact.load_state_dict(model.state_dict())
    found = train_with_scaler(model, initial_scale)
    with Float64Mode():
        wide = train_with_scaler(exact, initial_scale)
    assert wide == pytest.approx(found, rel=1e-5)
    assert {parameter.dtype for parameter in exact.parameters()} == {torch.float64}


@pytest.mark.parametrize("ends", [[3, 8], [0, 8], [8, 8], [2, 5]])
def test_products_of_groups_of_rows_are_those_of_float32(ends: list[int]):
    rows = torch.sin(torch.arange(8 * 16.0)).view(8, 16).requires_grad_()
    weights = torch.cos(torch.arange(2 * 16 * 16.0)).view(2, 16, 16).requires_grad_()
    offsets = torch.tensor(ends, dtype=torch.int32)
    known = ends[-1]  # PyTorch leaves the rows after the last group without values
    found = F.grouped_mm(rows, weights, offs=offsets)[:known]
    gradients = torch.autograd.grad(found.square().sum(), (rows, weights))
    wide = [item.detach().double().requires_grad_() for item in (rows, weights)]
    with Float64Mode():
        exact = F.grouped_mm(*wide, offs=offsets)[:known]
    torch.testing.assert_close(exact.float(), found)
    by_rows, by_weights = torch.autograd.grad(exact.square().sum(), wide)
    torch.testing.assert_close(by_rows.float()[:known], gradients[0][:known])
    torch.testing.assert_close(by_weights.float(), gradients[1])
    assert exact.dtype == torch.float64
