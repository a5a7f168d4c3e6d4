"""Features, classes, heads and rows of tables divided between ranks, as tensor parallelism divides them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sharded_feature_cases import (
    CASES,
    CLASSES,
    REDUCTIONS,
    TABLE,
    TARGET,
    WORDS,
    Case,
    check,
    make_random,
    nll_case,
    safe_softmax,
    square,
)
from simulated_ranks import Outcome, assert_runs_as_plain, run_on_simulated_axes
from torch import Tensor, nn

from rankless.compiler.ir.vocabulary_kernels import find_own_targets
from rankless.compiler.sharding import sharding_propagation
from rankless.parallel.tensor_placement import Replicate, Shard, split_lengths

aten = torch.ops.aten
MESHES = [
    ((2,), "uneven"),
    ((3,), "empty first"),
    ((3,), "empty last"),
    ((4,), "alone"),
    ((2, 2), "uneven"),
    ((2, 3), "empty first"),
]


@pytest.mark.ci_sample(6)
@pytest.mark.parametrize(("axis_sizes", "kind"), MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_divided_features_are_exact_and_stay_where_they_are(name: str, axis_sizes: tuple[int, ...], kind: str):
    case = CASES[name]
    check(case, axis_sizes, kind if case.allows_empty else "uneven")


def test_a_gradient_of_a_table_is_computed_in_the_pieces_in_which_it_is_kept(monkeypatch):
    lengths = (0, 12, 29)
    make_call, combines = sharding_propagation.make_call, sharding_propagation.combines

    def make_call_with_wish(node, placements, ranks, wanted=None, axis=0):
        is_gradient = node.target is aten.embedding_dense_backward.default and ranks == 3
        return make_call(node, placements, ranks, Shard(0, lengths) if is_gradient else wanted, axis)

    monkeypatch.setattr(sharding_propagation, "make_call", make_call_with_wish)
    monkeypatch.setattr(
        sharding_propagation,
        "combines",
        lambda strategy, call, outer: call.wanted in strategy.outputs or combines(strategy, call, outer),
    )
    for padding, by_frequency in ((None, True), (0, False), (12, True), (40, False)):
        for words in (WORDS, WORDS[:, :0]):
            for axis_sizes in ((3,), (2, 3)):
                outcome = differentiate_table(words, padding, by_frequency, axis_sizes)
                found = [
                    outcome.sharded.sharding(node)[-1]
                    for node in outcome.sharded.operators
                    if node.target is aten.embedding_dense_backward.default
                ]
                assert found == [Shard(0, lengths)]


def differentiate_table(words: Tensor, padding: int | None, by_frequency: bool, axis_sizes: Sequence[int]) -> Outcome:
    """Run a job that looks words up in a table, which is a parameter, and compare with plain."""
    table = nn.Embedding(TABLE, 5, padding_idx=padding, scale_grad_by_freq=by_frequency).double()
    rows = Shard(0, (2, 2))
    sharding = (Replicate(),) if len(axis_sizes) == 1 else (rows, Replicate())

    def job(indices: Tensor) -> Tensor:
        return square(table)(indices)[0]

    return assert_runs_as_plain(
        lambda: run_on_simulated_axes(job, {"table": table}, [words], axis_sizes, [lambda _: sharding]),
        job,
        {"table": table},
        [words],
    )


@pytest.mark.parametrize("indices", [[0, 41], [-1, 3], [40, 12345]], ids=str)
def test_an_index_outside_a_divided_table_raises(indices):
    case = Case(square(F.embedding), [torch.tensor(indices), make_random(TABLE, 5)], (None, 0), (None, None))
    with pytest.raises(IndexError, match="out of range"):
        check(case, (3,), "empty first")


@pytest.mark.parametrize("target", [CLASSES, -1, 12345])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_target_outside_divided_classes_raises(target, reduction):
    with pytest.raises(IndexError, match="out of bounds"):
        check(nll_case({"reduction": reduction}, target=torch.where(TARGET == 5, target, TARGET)), (3,), "empty first")


def test_targets_that_are_bytes_are_found_among_many_classes():
    target = torch.tensor([0, 5, 255], dtype=torch.uint8)
    assert find_own_targets(target, (1, 200, 300, 500, -100)).tolist() == [-1, -1, 55]
    assert find_own_targets(target, (1, 0, 200, 500, 255)).tolist() == [0, 5, -1]


HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def predict(function: Callable[..., Any], arguments: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """Return the results of a job without training whose arguments are divided between two ranks."""
    shardings = [
        lambda _, item=item, dim=dim: (Replicate() if dim is None else Shard(dim, split_lengths(item.shape[dim], 2)),)
        for item, dim in zip(arguments, dims, strict=True)
    ]
    return run_on_simulated_axes(function, {}, arguments, (2,), shardings, trains=False).results


HALF_PRODUCTS: dict[str, tuple[Callable[..., Tensor], Sequence[int], Sequence[int | None]]] = {
    "linear": (lambda b, x, y: F.linear(x, y.t(), b), (4,), (None, 1, 0)),
    "linear over sequences": (lambda b, x, y: F.linear(x.unsqueeze(1), y.t(), b), (4,), (None, 1, 0)),
    "addmm": (torch.addmm, (6, 4), (None, 1, 0)),
    "addmv": (lambda b, x, y: torch.addmv(b, x, y[:, 0]), (6,), (None, 1, 0)),
    "baddbmm": (lambda b, x, y: torch.baddbmm(b[None], x[None], y[None]), (6, 4), (None, 1, 0)),
    "addbmm": (lambda b, x, y: torch.addbmm(b, x[None], y[None]), (6, 4), (None, 1, 0)),
}


@HALF
@pytest.mark.parametrize("name", HALF_PRODUCTS)
def test_a_product_with_a_bias_in_half_precision_is_rounded_once(name, dtype):
    function, shape, dims = HALF_PRODUCTS[name]
    bias, x, y = make_random(*shape), make_random(6, 300), make_random(300, 4)
    y[150:] = -y[:150] * (1 + 2**-6)  # the ranks' terms almost cancel
    x[:, 150:] = x[:, :150]
    arguments = [item.to(dtype) for item in (bias, x, y)]
    found = predict(function, arguments, dims)[0]
    exact = function(*(item.double() for item in arguments))
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


@HALF
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, lambda x, _: safe_softmax(x)])
def test_softmax_in_half_precision_is_rounded_once(function, dtype):
    x = (make_random(4, 300) * 3).to(dtype)
    found = predict(lambda x: function(x, -1), [x], (1,))[0]
    exact = function(x.double(), -1)
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-7).all()


@HALF
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_in_half_precision_is_summed_in_float32(reduction, dim, dtype):
    scores, target = (make_random(3000, 8).abs() + (20 if reduction == "mean" else 0)).to(dtype), torch.arange(3000) % 8

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(x, y, reduction=reduction)

    found = predict(loss, [scores, target], (dim, None if dim else 0))[0]
    exact = loss(scores.double(), target)
    assert found.dtype == dtype
    assert (found.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * exact.abs()
