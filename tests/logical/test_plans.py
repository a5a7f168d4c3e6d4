"""Calls that differ in sizes and numbers alone share plans, and compute what one device computes."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from logical.view_comparison import divide, is_equal, to_plain
from support.processes import on_mesh
from torch import Tensor
from torch.utils import _pytree as pytree

from rankless.logical_view import function_handlers, plan_cache  # noqa: F401  # registers what tensors answer
from rankless.logical_view.gradients import LogicalBackward
from rankless.logical_view.tensor import LogicalView
from rankless.parallel.mesh import Mesh

pytestmark = pytest.mark.slow

Varied = Callable[[Tensor, int], Any]

WEIGHT = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5).requires_grad_()


def scale_rows(x: Tensor, _: int) -> tuple[Tensor, Tensor]:
    """Return rows times numbers that are whole on each rank, and a gradient of these."""
    numbers = torch.arange(1.0, 1 + len(x), dtype=x.dtype).unsqueeze(1).requires_grad_()
    (gradient,) = torch.autograd.grad((x * numbers).square().sum(), numbers, retain_graph=True)
    return x * numbers, gradient


def set_column(x: Tensor, number: float) -> Tensor:
    """Return rows with a number in a column."""
    found = x.clone()
    found[:, 1] = number
    return found


BY_SIZE: dict[str, Varied] = {
    "linear": lambda x, _: F.linear(x, WEIGHT),
    "scaled rows": scale_rows,
    "norms": lambda x, _: (F.layer_norm(x, (5,)), x.softmax(1), F.normalize(x)),
    "view": lambda x, _: x.view(x.size(0), -1, 1),
    "flattened": lambda x, _: x.reshape(x.size(0) * 5),
    "transposed": lambda x, _: x.t().contiguous(),
    "mean": lambda x, _: x.mean(),
    "mean of columns": lambda x, _: x.mean(0),
    "loss": lambda x, _: F.cross_entropy(x, torch.arange(len(x)) % 5),
    "batch norm": lambda x, _: F.batch_norm(x, None, None, training=True),
    "dropout": lambda x, _: F.dropout(x, 0.3),
    "noise": lambda x, _: x + torch.randn_like(x),
    "in place": lambda x, _: x.clone().mul_(2).relu_(),
    "gram": lambda x, _: (x @ x.T, x.T @ x),
    "concatenated": lambda x, _: torch.cat([x, x], 1),
    "concatenated rows": lambda x, _: torch.cat([x, x]),
    "sorted": lambda x, _: x.sort(0)[0],
    "selected": lambda x, _: x[x.detach() > 0].sum(),
    "attention": lambda x, _: F.scaled_dot_product_attention(*[x.view(-1, 1, 5, 1)] * 3, is_causal=True),
}
"""Calls of batches of other sizes."""

BY_NUMBER: dict[str, Varied] = {
    "times an integer": lambda x, step: x * (step - 2),
    "times a real number": lambda x, step: x.mul(0.1 * step),
    "a weighted loss": lambda x, step: x.square().mean() * (1 / (step + 1)),
    "a loss less a number": lambda x, step: (x.square().mean() - 0.1 * step, x.mean() + step),
    "alpha": lambda x, step: x.add(x.detach(), alpha=0.1 * step),
    "power": lambda x, step: (x.abs() + 1) ** (step - 1),
    "real power": lambda x, step: (x.abs() + 1) ** (0.5 * step),
    "interpolated": lambda x, step: x.lerp(x * 2, 0.1 * step),
    "clamped": lambda x, step: x.clamp(-step, 0.5 * step),
    "annealed": lambda x, step: F.gumbel_softmax(x, tau=1 + 0.1 * step),
    "smoothed": lambda x, step: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long), label_smoothing=0.05 * step),
    "dropout from zero": lambda x, step: F.dropout(x, 0.1 * step),
    "column set to an integer": set_column,
    "column set to a real number": lambda x, step: set_column(x, 0.1 * step),
    "row by number": lambda x, step: x[step],
    "column by number": lambda x, step: x[:, step % 5],
    "rows": lambda x, step: x[step : step + 2],
    "columns": lambda x, step: x[:, : 1 + step % 5],
    "rolled": lambda x, step: x.roll(step, 0),
    "sum over a dim": lambda x, step: x.sum(step % 2),
    "filled": lambda x, step: torch.full_like(x, step) + x,
    "repeated": lambda x, step: x.repeat(1, step + 1),
    "leaking": lambda x, step: F.leaky_relu(x, 0.1 * step - 0.2),
}
"""Calls with other numbers."""

SEQUENCES: dict[str, Varied] = {
    "linear": lambda x, _: F.linear(x, WEIGHT),
    "attention": lambda x, _: F.scaled_dot_product_attention(x, x, x),
    "heads": lambda x, _: x.view(x.shape[0], x.shape[1], 5, 1).transpose(1, 2).reshape(-1, x.shape[1]),
    "flat loss": lambda x, _: F.cross_entropy(x.view(-1, 5), torch.zeros(x.size(0) * x.size(1), dtype=torch.long)),
    "time first": lambda x, _: x.transpose(0, 1).contiguous().softmax(-1),
    "last": lambda x, _: x[:, -1],
    "shifted": lambda x, _: x[:, 1:] - x[:, :-1],
    "convolved": lambda x, _: F.conv1d(x.transpose(1, 2), WEIGHT.unsqueeze(-1)),
    "mask": lambda x, _: (x @ x.mT).masked_fill(torch.ones(x.size(1), x.size(1)).tril() == 0, -9.0).softmax(-1),
}
"""Calls of sequences of other lengths."""


def make_batch(rows: int, length: int | None = None) -> Tensor:
    shape = (rows, 5) if length is None else (rows, length, 5)
    numbers = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return (numbers * 0.7).sin() * 3


def run(call: Varied, batch: Tensor, number: int) -> list[Any]:
    """Return the leaves of what a call returns, and the gradient of the sum of its squares."""
    torch.manual_seed(number)
    scale = torch.full((5,), 1.5, requires_grad=True)
    try:
        result = call(batch * scale, number)
    except (RuntimeError, IndexError) as error:
        return [type(error), str(error)]
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    sum((leaf * leaf).sum() for leaf in leaves).backward()
    with torch.no_grad():
        return [*pytree.tree_leaves(pytree.tree_map(to_plain, result)), scale.grad]


GROUPS: dict[str, tuple[dict[str, Varied], list[Tensor]]] = {
    "sizes": (BY_SIZE, [make_batch(rows) for rows in (8, 7, 10, 12, 9, 6)]),
    "numbers": (BY_NUMBER, [make_batch(9)] * 7),
    "lengths": (SEQUENCES, [make_batch(7, length) for length in (6, 4, 9, 5, 7, 3)]),
}
TRACED_AGAIN = {"power", "real power", "interpolated", "smoothed", "dropout from zero"}
"""These compute something else for each number."""
IN_CI = {"linear", "view", "dropout", "loss", "times an integer", "dropout from zero", "column by number", "flat loss"}
CASES = [
    pytest.param(group, name, workers, marks=() if workers == 2 and name in IN_CI else pytest.mark.exhaustive)
    for group, (calls, _) in GROUPS.items()
    for name in calls
    for workers in (2, 3)
]


def compare_steps(mesh: Mesh, group: str, name: str) -> tuple[list[str], int]:
    """Return the steps of a call that differ from plain PyTorch's, and how often the last two were traced."""
    view, (calls, batches), differing = LogicalView(mesh, lambda _: None), GROUPS[group], []
    torch.set_default_dtype(torch.float64)
    with mock.patch.object(plan_cache, "lower_call", wraps=plan_cache.lower_call) as lower:
        for step, batch in enumerate(batches):
            expected = run(calls[name], batch.double(), step)
            if step == len(batches) - 2:
                lower.reset_mock()
            with LogicalBackward(view).install():
                found = run(calls[name], divide(batch.double(), view), step)
            if not is_equal(expected, found):
                differing.append(f"step {step}: {found} instead of {expected}")
    torch.set_default_dtype(torch.float32)
    return differing, lower.call_count


@pytest.mark.parametrize(("group", "name", "workers"), CASES)
@pytest.mark.ci_sample(4)
def test_other_sizes_and_numbers_compute_what_one_device_computes(group: str, name: str, workers: int) -> None:
    for differing, traces in on_mesh(workers, compare_steps, group, name):
        assert not differing, "\n".join(differing)
        assert (traces > 0) == (name in TRACED_AGAIN), traces


@pytest.fixture
def view_of_one_rank() -> tuple[LogicalView, list[str]]:
    """Return the view of one of two ranks that never meet, and its notices."""
    notices: list[str] = []
    return LogicalView(Mesh(rank=0, size=2, device=torch.device("cpu")), notices.append), notices


def test_signatures_that_share_no_plan_are_bounded_and_noticed(
    view_of_one_rank: tuple[LogicalView, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    view, notices = view_of_one_rank
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 8)
    batch = divide(make_batch(8), view)
    for number in range(1, 31):
        F.dropout(batch, number / 100)
        assert len(view.plans.recent) <= 8
    (notice,) = notices
    assert "test_plans.py" in notice
    assert "dropout has been traced 12 times" in notice
    assert len(view.plans._older) <= 8


def test_plans_in_use_stay(view_of_one_rank: tuple[LogicalView, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    view, _ = view_of_one_rank
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 8)
    batch = divide(make_batch(8), view)
    batch.exp()
    with mock.patch.object(plan_cache, "lower_call", wraps=plan_cache.lower_call) as lower:
        for number in range(20):
            batch.exp()
            batch.mul(float(number))
    assert lower.call_count == 3
    assert len(view.plans.recent) <= 8


def test_autocast_to_another_dtype_is_another_signature(view_of_one_rank: tuple[LogicalView, list[str]]) -> None:
    view, _ = view_of_one_rank
    batch = divide(make_batch(8), view)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert (batch @ batch.T).local.dtype == dtype
