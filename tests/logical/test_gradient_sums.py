"""In the logical view, gradients of leaves are summed in buckets while the backward pass goes on."""

from typing import Any
from unittest import mock

import pytest
import torch
from logical.test_logical_view import divide
from support.processes import on_mesh
from torch import Tensor, nn

from rankless.logical_view import bucketed_gradient_sums, function_handlers  # noqa: F401  # registers what tensors answer
from rankless.logical_view.bucketed_gradient_sums import GradientPass, find_leaves
from rankless.logical_view.gradient_shards import GradientShards
from rankless.logical_view.gradients import LogicalBackward
from rankless.logical_view.tensor import LogicalView
from rankless.parallel.mesh import Mesh

pytestmark = pytest.mark.slow


def make_model() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(5, 5, dtype=torch.float64), nn.Conv1d(1, 2, 3, padding=1, dtype=torch.float64)]
    layers[1].weight.data = layers[1].weight.data.transpose(0, 2).contiguous().transpose(0, 2)  # strides of its own
    return nn.ModuleList([*layers, nn.Linear(10, 1, dtype=torch.float64)])


def compute(model: Any, batch: Tensor) -> Tensor:
    hidden = torch.tanh(model[0](batch))
    return model[2](model[1](hidden.unsqueeze(1)).flatten(1)).square().mean()


def sum_in_buckets(mesh: Mesh, bucket_bytes: int) -> tuple[list[int], list[bool]]:
    """Return how many sums had started when each leaf's gradient arrived, and which gradients are right.

    The last of the leaves has a gradient already.
    """
    batch, expected, model = torch.arange(35.0, dtype=torch.float64).reshape(7, 5) / 9, make_model(), make_model()
    for copy in (expected, model):
        copy[2].bias.grad = torch.ones_like(copy[2].bias)
    compute(expected, batch).backward()
    view, starts = LogicalView(mesh, lambda _: None), []
    with (
        LogicalBackward(view).install(),
        mock.patch.multiple(bucketed_gradient_sums, BUCKET_BYTES=bucket_bytes, FIRST_BUCKET_BYTES=bucket_bytes),
        mock.patch.object(
            bucketed_gradient_sums, "start_all_reduce", wraps=bucketed_gradient_sums.start_all_reduce
        ) as start,
    ):
        loss = compute(model, divide(batch, view))
        for parameter in model.parameters():
            parameter.register_hook(lambda _: starts.append(start.call_count))
        loss.backward()
    pairs = zip(expected.parameters(), model.parameters(), strict=True)
    right = [torch.allclose(one.grad, other.grad) and one.grad.stride() == other.grad.stride() for one, other in pairs]
    return starts, right


@pytest.mark.parametrize("workers", [2, 3])
def test_sums_start_before_the_pass_ends(workers: int) -> None:
    for starts, right in on_mesh(workers, sum_in_buckets, 1):
        assert starts == sorted(starts)
        assert starts[-1] >= 4
        assert all(right)


def test_small_gradients_are_summed_together() -> None:
    for starts, right in on_mesh(2, sum_in_buckets, 1 << 20):
        assert starts == [0] * 6
        assert all(right)


def test_leaves_come_in_the_order_of_their_use() -> None:
    first, second, third = (torch.ones(2, requires_grad=True) for _ in range(3))
    root = ((first * second).sin() * third + first).sum()
    assert [leaf is wanted for leaf, wanted in zip(find_leaves([root]), (first, second, third), strict=True)] == [
        True
    ] * 3
    assert find_leaves([first])[0] is first


def test_gradients_are_as_before_after_a_pass_that_failed() -> None:
    axis = Mesh(rank=0, size=2, device=torch.device("cpu")).axes[0]
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    leaf.grad = torch.full((2,), 5.0)
    present = GradientPass(GradientShards(axis, lambda _: None), create_graph=False)
    present.add([leaf, other], overlaps=True)
    (leaf * other).sum().backward()
    present.undo()
    assert leaf.grad.tolist() == [5.0, 5.0]
    assert other.grad is None
