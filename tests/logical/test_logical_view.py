"""In the logical view, PyTorch functions and loops compute on divided batches what they compute on one device.

The oracle is plain PyTorch on the whole batch, in float64.
"""

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from data.logical_operations import CHANGING, COMPUTING, READING
from logical.aliases import ALIASES
from logical.calls import INDEXING, LOSSES, MODELS, POINTWISE, PRODUCTS, RANDOM, REDUCTIONS, SHAPES
from logical.loops import LOOPS
from logical.view_comparison import Source, describe, divide, is_equal, make_batch
from support.processes import on_mesh
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankless.logical_view import function_handlers  # noqa: F401  # registers what tensors answer
from rankless.logical_view.gradients import LogicalBackward
from rankless.logical_view.tensor import DividedTensor, LogicalView
from rankless.parallel.mesh import Mesh

pytestmark = pytest.mark.slow

LOOP_GROUPS = 4
"""Of a group that takes longer than a minute, loaded machines return nothing in time."""
GROUPS: dict[str, dict[str, Callable[[Tensor], Any]]] = {
    "reading": READING,
    "computing": COMPUTING,
    "changing": CHANGING,
    "losses": LOSSES,
    "products": PRODUCTS,
    "indexing": INDEXING,
    "shapes": SHAPES,
    "reductions": REDUCTIONS,
    "pointwise": POINTWISE,
    "random": RANDOM,
    "aliases": ALIASES,
    **{
        f"loops {number + 1}": {name: LOOPS[name] for name in list(LOOPS)[number::LOOP_GROUPS]}
        for number in range(LOOP_GROUPS)
    },
    "some loops": {
        name: LOOPS[name]
        for name in (
            "adam",
            "gan",
            "gradient penalty",
            "wgan",
            "hooks of parameters",
            "set elements",
            "reentrant checkpoint",
        )
    },
}
IN_CI = {
    ("reading", "data", 2),
    ("shapes", "data", 2),
    ("losses", "weight", 2),
    ("indexing", "leaf", 2),
    ("losses", "twice", 2),
    ("some loops", "data", 2),
    ("aliases", "weight", 2),
}
"""A call takes two traces the first time, so the soak runs most groups."""
CASES = [
    pytest.param(group, source, workers, marks=() if (group, source, workers) in IN_CI else pytest.mark.exhaustive)
    for group, source, workers in product(GROUPS, ("data", "leaf", "weight", "twice"), (2, 3))
]


def run_model(make: Callable[[], nn.Module]) -> Callable[[Tensor], Any]:
    """Return a call that makes a model and returns its output, its gradients and its buffers."""

    def run(batch: Tensor) -> Any:
        torch.manual_seed(5)
        model = make()
        output = model(batch)
        first = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
        parameters = list(model.parameters())
        gradients = torch.autograd.grad((first * first).sum(), parameters, retain_graph=True, allow_unused=True)
        return output, gradients, list(model.buffers())

    return run


def compare(mesh: Mesh, calls: dict[str, Callable[[Tensor], Any]], source: Source) -> list[str]:
    """Return the calls whose results in the logical view differ from plain PyTorch's."""
    view = LogicalView(mesh, lambda _: None)
    differing = []
    torch.set_default_dtype(torch.float64)
    try:
        for name, call in calls.items():
            expected = describe(call, make_batch(), source)
            with LogicalBackward(view).install():
                found = describe(call, divide(make_batch(), view), source)
            if not is_equal(expected, found) and "is not implemented" not in str(expected[-1]):
                differing.append(f"{name}: {str(found)[:1500]} instead of {str(expected)[:1500]}")
    finally:
        torch.set_default_dtype(torch.float32)
    return differing


def compare_group(mesh: Mesh, group: str, source: Source) -> list[str]:
    return compare(mesh, GROUPS[group], source)


def compare_models(mesh: Mesh, source: Source) -> list[str]:
    return compare(mesh, {name: run_model(make) for name, make in MODELS.items()}, source)


@pytest.mark.parametrize(("group", "source", "workers"), CASES)
@pytest.mark.ci_sample(4)
def test_calls_and_loops_compute_what_one_device_computes(group: str, source: Source, workers: int) -> None:
    for differing in on_mesh(workers, compare_group, group, source):
        assert not differing, "\n".join(differing)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("source", ["weight", "leaf"])
def test_models_compute_what_one_device_computes(source: Source, workers: int) -> None:
    for differing in on_mesh(workers, compare_models, source):
        assert not differing, "\n".join(differing)


def list_notices(mesh: Mesh) -> list[str]:
    """Return the notices of calls that keep rows apart, but could be taken for others."""
    notices: list[str] = []
    view = LogicalView(mesh, notices.append)
    with LogicalBackward(view).install():
        batch = divide(make_batch(), view)
        assert type(batch[torch.arange(7), batch.argmax(1)]) is type(batch[range(7), [-1] * 7]) is DividedTensor
        assert batch[:, [0, -1]].shape == batch[:, range(2)].shape == batch[:, numpy.array([1, 3])].shape
        batch[:, 0] = 1.0
        batch[:, [1, 2]] = 2
        batch[batch > 9] = float("-inf")
        batch[..., 1:3] += 0.5
        torch.cdist(batch, torch.eye(30, 5)), torch.cdist(torch.eye(30, 5), batch)
        torch.distributions.Exponential(batch.exp() + 1.0).log_prob(batch.abs())
    return notices


def test_chosen_columns_and_set_elements_stay_divided() -> None:
    assert on_mesh(2, list_notices) == [[], []]


def count_gathers(mesh: Mesh) -> list[int]:
    """Return how often a batch was gathered after reads, and after a change in place and more reads."""
    view = LogicalView(mesh, lambda _: None)
    with LogicalBackward(view).install(), mock.patch.object(view.agreement, "check") as check:
        batch = divide(make_batch(), view)
        assert [batch[0].shape, batch[1:3].shape, len(batch.tolist()), len(str(batch)) > 9, len(list(batch))] == [
            *((5,), (2, 5), 7, True, 7)
        ]
        first = check.call_count
        batch.add_(1)
        batch[2], batch.tolist(), batch.numpy()
        return [first, check.call_count]


def test_a_batch_is_gathered_once_until_it_changes() -> None:
    assert on_mesh(2, count_gathers) == [[1, 1]] * 2, "its views are made equal without a gather of their own"
