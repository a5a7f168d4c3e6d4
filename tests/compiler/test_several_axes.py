"""Programs divided along several axes at once: every worker computes its piece, and all agree with plain PyTorch."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from simulated_ranks import Outcome, assert_runs_as_plain, divide_evenly, run_on_simulated_axes
from torch import Tensor, nn

from rankless.compiler.sharding.redistribute import list_steps
from rankless.parallel.tensor_placement import Partial, Replicate, Shard

WHOLE = Replicate()


def check(
    function: Callable[..., Tensor],
    arguments: Sequence[Tensor],
    dims: Sequence[Sequence[int | None]],
    *modules: nn.Module,
    axis_sizes: Sequence[int] = (2, 3),
) -> Outcome:
    """Run a job whose arguments are divided along these dims, one for each axis, and compare with plain PyTorch.

    A job without modules gets one: parameters by which its first argument is multiplied.
    """
    if not modules:
        scales = nn.ParameterList([torch.linspace(0.5, 1.5, arguments[0].shape[-1])])
        modules, scaled = (scales,), function

        def function(first: Tensor, *others: Tensor) -> Tensor:
            return scaled(first * scales[0], *others)

    named = {f"module{number}": module.double() for number, module in enumerate(modules)}
    shardings = [divide_evenly(item.shape, axis_sizes, of_axes) for item, of_axes in zip(arguments, dims, strict=True)]
    return assert_runs_as_plain(
        lambda: run_on_simulated_axes(function, named, arguments, axis_sizes, shardings), function, named, arguments
    )


def count_split(outcome: Outcome) -> list[int]:
    """Return for each axis the number of operators with an input or output that it divides."""
    return [
        sum(
            any(isinstance(item, Shard) for item in (*strategy.inputs, *strategy.outputs))
            for strategy in axis.strategies.values()
        )
        for axis in outcome.sharded.axes
    ]


X = torch.randn(7, 5, 8, dtype=torch.float64, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
DIMS = [pair for pair in product((None, 0, 1, 2), repeat=2) if any(dim is not None for dim in pair)]


@pytest.mark.ci_sample(8)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_pointwise_operators_and_sums_are_divided_by_both_axes(dims):
    outcome = check(lambda x: (x.sin() * 2 + x.square()).sum(), [X], [dims])
    assert all(count > 0 for count, dim in zip(count_split(outcome), dims, strict=True) if dim is not None)
    assert all(move.purpose == "output" for move in outcome.local.collectives)


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_means_divide_by_the_logical_count(dims):
    check(lambda x: (x.mean((0, 1)) * x.mean(-1).sum()).mean() + x.var(), [X], [dims])


@pytest.mark.ci_sample(5)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("axis_sizes", [(2, 2), (3, 2), (2, 4)], ids=str)
def test_a_network_with_normalization_and_dropout_is_exact(dims, axis_sizes):
    layers = nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 8)

    def loss(x):
        hidden = F.dropout(F.gelu(layers[1](layers[0](x))), 0.3)
        return (layers[2](hidden) - x).square().mean()

    check(loss, [X], [dims], *layers, axis_sizes=axis_sizes)


@pytest.mark.parametrize("dims", [(0, 0), (0, 2), (2, 0), (3, 0), (1, 0), (0, None), (None, 0)], ids=str)
@pytest.mark.ci_sample(3)
def test_batch_norm_and_convolutions_are_exact(dims):
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    check(lambda x: layers[1](layers[0](x)).relu().square().mean(), [x], [dims], *layers)
    check(lambda x: F.avg_pool2d(layers[1](x.repeat(1, 2, 1, 1)[:, :4]), 2).tanh().sum(), [x], [dims], layers[1])


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (0, 0), (1, 1)], ids=str)
def test_a_transformer_layer_with_divided_sequences_is_exact(dims):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    check(lambda x: layer(x).square().mean(), [X], [dims], layer)


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (0, 0)], ids=str)
def test_cross_entropy_over_positions_divides_by_all_valid_targets(dims):
    table, head = nn.Embedding(11, 8), nn.Linear(8, 11)
    words = torch.randint(0, 11, (7, 5), generator=torch.Generator(torch.get_default_device()).manual_seed(2))
    targets = words.roll(1, 1).masked_fill(words > 7, -100)

    def loss(words, targets):
        scores = head(table(words))
        return F.cross_entropy(scores.transpose(1, 2), targets) + F.cross_entropy(
            scores.flatten(0, 1), targets.flatten()
        )

    check(loss, [words, targets], [dims, dims], table, head)


@pytest.mark.ci_sample(6)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_random_numbers_are_those_of_the_whole(dims):
    check(lambda x: (torch.rand_like(x) * x + torch.randn_like(x) + F.dropout(x, 0.5)).square().mean(), [X], [dims])


@pytest.mark.parametrize("dims", [(0, 1), (1, 1), (2, 0), (0, 0)], ids=str)
def test_two_arguments_may_be_divided_in_different_ways(dims):
    other = torch.randn(7, 5, 8, dtype=torch.float64)
    check(lambda x, y: (x @ y.transpose(1, 2)).softmax(-1).square().sum(), [X, other], [dims, dims[::-1]])


@pytest.mark.ci_sample(5)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_views_and_indices_are_exact(dims):
    def loss(x):
        merged = x.reshape(35, 8).unflatten(0, (7, 5)).permute(2, 0, 1)
        return (merged.flatten(1) ** 2).cumsum(1).mean() + x[torch.arange(7), torch.tensor([0, 1, 4, 3, 3, 2, 0])].sum()

    check(loss, [X], [dims])


def test_maxima_of_parts_are_combined_along_both_axes():
    check(lambda x: x.amax() + x.amax(0).sum() - x.amin((0, 1)).square().sum(), [X], [(0, 1)])


def test_products_of_sums_along_different_axes_are_sums_along_both():
    """Each factor is a partial sum along one axis only; every pair of terms is multiplied once."""
    check(lambda x, y: (x.sum(0) * y.sum(1)).square().sum(), [X[:5], X[:5, :5]], [(0, None), (None, 1)])


def test_three_axes_are_exact():
    layer = nn.Linear(8, 8)
    for dims in [(0, 1, 2), (2, 1, 0), (0, 0, 0), (0, 1, 0), (1, None, 0)]:
        check(lambda x: layer(x).sin().mean(), [X], [dims], layer, axis_sizes=(2, 2, 2))


A, B, C = Shard(0, (4, 3)), Shard(0, (2, 2)), Shard(1, (3, 2))


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ((A, WHOLE), (WHOLE, WHOLE), [(WHOLE, WHOLE)]),
        ((A, C), (WHOLE, WHOLE), [(WHOLE, C), (WHOLE, WHOLE)]),  # different dims: any order is right
        ((A, B), (WHOLE, B), [(A, WHOLE), (WHOLE, WHOLE), (WHOLE, B)]),
        ((WHOLE, A), (A, WHOLE), [(WHOLE, WHOLE), (A, WHOLE)]),
        ((A, WHOLE), (C, WHOLE), [(C, WHOLE)]),
        ((A, C), (C, B), [(A, WHOLE), (C, WHOLE), (C, B)]),
        ((Partial(), A), (WHOLE, A), [(WHOLE, A)]),
        ((A, Shard(1, (4, 1))), (A, C), [(A, WHOLE), (A, C)]),
        ((Partial("max"), WHOLE), (A, WHOLE), [(WHOLE, WHOLE), (A, WHOLE)]),
    ],
)
def test_one_axis_changes_at_a_time_and_inner_pieces_of_a_dim_first(source, target, steps):
    found = list_steps(source, target)
    assert found[-1] == target
    for before, after in zip([source, *found[:-1]], found, strict=True):
        assert sum(pair[0] != pair[1] for pair in zip(before, after, strict=True)) == 1
    assert found == steps
