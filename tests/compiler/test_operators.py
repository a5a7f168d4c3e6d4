"""Every operator that has a rule, forward and backward, on uneven shards against one device in float64."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simulated_ranks import Outcome, assert_same_as_plain
from torch import Tensor, nn

from rankless.compiler.rules.table import SHARDING_RULES
from rankless.parallel.tensor_placement import Replicate

aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """A function of a batch `x` whose rows have the given shape; gradients flow through it to a factor of x."""

    function: Callable[[Tensor], Any]
    shape: tuple[int, ...] = (6,)
    rows: int = 7


def weighted(value: Tensor) -> Tensor:
    """Return a sum in which every element has a different weight."""
    weights = torch.sin(torch.arange(1.0, value.numel() + 1)).view(value.shape)
    return (value * weights).sum()


def batch_last(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda x: function(x.movedim(0, -1))


def batch_second(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda x: function(x.transpose(0, 1))


def labels_of(x: Tensor, classes: int) -> Tensor:
    """Return integers below `classes` that are sharded like the rows of x."""
    return (x.detach().flatten(1).sum(1).abs() * 1000).long() % classes


def numbers(*shape: int) -> Tensor:
    return torch.sin(torch.arange(1.0, math.prod(shape) + 1) * 7).view(shape)


def attention(causal: bool = False, masked: str = "") -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        query, key, value = x.view(x.shape[0], 2, 4, 3, 3).unbind(3)
        mask = None
        if masked == "positions":
            mask = numbers(4, 4)
        elif masked == "rows":
            mask = x.view(x.shape[0], -1)[:, :4].view(-1, 1, 1, 4)
        elif masked == "boolean":
            mask = torch.ones(4, 4, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)

    return function


def run_recurrent(kind: str) -> Callable[[Tensor], Tensor]:
    layer = getattr(nn, kind)(3, 2, batch_first=True).double()
    for place, parameter in enumerate(layer.parameters()):
        parameter.requires_grad_(False).copy_(numbers(*parameter.shape) * (place + 1) / 4)
    weights = list(layer.parameters())

    def function(x: Tensor) -> Tensor:
        sequence = x.view(x.shape[0], 4, 3)
        state = x.new_zeros(1, x.shape[0], 2)
        if kind == "LSTM":
            out, hidden, cell = torch.lstm(sequence, (state, state), weights, True, 1, 0.0, True, False, True)
            return torch.cat([out, hidden.transpose(0, 1), cell.transpose(0, 1)], dim=1)
        out, hidden = torch.gru(sequence, state, weights, True, 1, 0.0, True, False, True)
        return torch.cat([out, hidden.transpose(0, 1)], dim=1)

    return function


VIEWS = {
    "view that divides": Case(lambda x: x.reshape(x.shape[0] * 2, 3)),
    "view that merges": Case(lambda x: x.reshape(-1), (2, 3)),
    "view that mixes": Case(lambda x: x.reshape(6, -1) ** 2),
    "view of the batch in the middle": Case(batch_second(lambda x: x.reshape(2, -1) ** 2), (2, 3)),
    "unsafe view": Case(lambda x: x @ numbers(3, 4), (2, 3)),
    "t": Case(lambda x: x.t().square()),
    "permute": Case(lambda x: x.permute(2, 0, 1).square(), (2, 3)),
    "unsqueeze": Case(lambda x: x.unsqueeze(0).square() + x.unsqueeze(-1).sum()),
    "squeeze": Case(lambda x: x.squeeze().square(), (1, 3, 1)),
    "squeeze that keeps rows of one": Case(
        lambda x: torch.cat([x.squeeze(), x.squeeze((0, 1)), x.squeeze(0)[:, 0]], 1).square(), (1, 3)
    ),
    "squeeze of a dim": Case(lambda x: x.squeeze(1).square(), (1, 3)),
    "squeeze of dims": Case(lambda x: x.squeeze((1, 3)).square(), (1, 3, 1)),
    "select": Case(lambda x: x[:, 2].square().sum() + x[4].square()),
    "slice": Case(lambda x: x[:, 1:5:2].square().sum() + x[2:-1].square()),
    "slice of all": Case(lambda x: x[:, :].square() + x[0:].square()),
    "expand": Case(lambda x: x[:, None].expand(-1, 3, -1).square()),
    "expand of the batch": Case(batch_last(lambda x: x.expand(2, *x.shape).square())),
    "repeat": Case(lambda x: x.repeat(1, 2).square().sum() + x.repeat(2, 1).square()),
    "pad": Case(lambda x: F.pad(x, (1, 2)).square().sum() + F.pad(x, (0, 0, 1, -1)).square()),
    "cat": Case(lambda x: torch.cat([x, x.square()], 1).square()),
    "cat with an empty cache": Case(lambda x: torch.cat([x.new_empty(0), x, x.square()], 1).square()),
    "cat of batches": Case(lambda x: torch.cat([x, x.square()]).square()),
    "split": Case(lambda x: sum(part.square().sum() * 2**i for i, part in enumerate((*x.split(4, 1), *x.chunk(3))))),
    "split by sizes": Case(
        lambda x: torch.cat([p.cos() for p in (*x.split([1, 2, 3], 1), *x.split([1, 4, 2]))][:3], 1)
    ),
    "stack and unbind": Case(lambda x: torch.stack(x.unbind(1), 1).square()),
}
REDUCTIONS = {
    "sum": Case(lambda x: x.sum().square()),
    "sum over dims": Case(lambda x: x.sum(0).square().sum() + x.sum(1, keepdim=True).square()),
    "mean": Case(lambda x: x.mean().square()),
    "mean over dims": Case(lambda x: x.mean(0, keepdim=True).square().sum() + x.mean((0, 1)).square() + x.mean(1)),
    "mean of a partial sum": Case(lambda x: x.sum(0).mean().square()),
    "max and min": Case(lambda x: x.max() * x.min()),
    "amax and amin": Case(lambda x: x.amax(0).square() + x.amin(0) + x.amax(1).sum()),
    "tril and triu": Case(lambda x: x.tril(1).square() + x.triu(-1), (4, 4)),
    "softmax": Case(lambda x: x.softmax(1).square().sum() + x.softmax(0)),
    "safe softmax": Case(lambda x: aten._safe_softmax(x, 1).square()),
    "log softmax": Case(lambda x: x.log_softmax(1).square().sum() + x.log_softmax(0)),
    "argmax and argmin": Case(lambda x: (x.argmax(1) + x.argmin(1) + x.argmin(0).sum() + x.argmax()) * x[:, 0]),
    "max and min of a dim": Case(lambda x: x.max(1)[0].square().sum() + x.min(0)[0] + x.min(1)[0].sum()),
    "any and all": Case(lambda x: x * ((x > 0).any(1) & (x < 2).all(1))[:, None]),
    "any and all of dims": Case(lambda x: x * (x > 0).any((1, 2), True) * (x < 3).all((1, 2), True), (2, 3)),
    "prod": Case(lambda x: x.prod(1).square()),
    "cumsum and cumprod": Case(lambda x: x.cumsum(1).square() + x.cumprod(1) + x.cumsum(0)),
    "sort and topk": Case(lambda x: x.sort(1)[0].square().sum() + x.topk(2, 1)[0].square() + x.sort(0)[0].sum()),
    "flip": Case(lambda x: x.flip(1).square() + x.flip(0)),
    "logcumsumexp": Case(lambda x: x.logcumsumexp(1).square()),
    "var, std, norms and logsumexp": Case(lambda x: x.var(0) + x.std() + x.norm() + x.logsumexp(0) + x.std(1).sum()),
    "ones like a partial sum": Case(lambda x: torch.ones_like(x.sum(0)) * x + torch.full_like(x.sum(0), 3) * x),
}
MATRICES = {
    "mm": Case(lambda x: x @ numbers(6, 3) + (x.t() @ x).sum()),
    "bmm": Case(lambda x: x @ x.transpose(1, 2), (2, 3)),
    "bmm over the batch": Case(lambda x: torch.einsum("bij,bik->ijk", x, x), (2, 3)),
    "mv": Case(lambda x: aten.mv(x, numbers(6)).square() + aten.mv(x.t(), x[:, 0]).sum()),
    "dot": Case(lambda x: torch.dot(x[:, 0], x[:, 1]).square()),
    "addmm": Case(lambda x: torch.addmm(numbers(3), x, numbers(6, 3)).square()),
    "addmm over the batch": Case(lambda x: torch.addmm(numbers(6, 6), x.t(), x).square()),
    "addmm with a bias per row": Case(lambda x: torch.addmm(x[:, :1], x, numbers(6, 3)).square()),
    "addmm with factors": Case(lambda x: torch.addmm(x.t() @ x, x.t(), x, beta=0.5, alpha=2.0).square()),
    "baddbmm": Case(lambda x: torch.baddbmm(x[:, :, :2], x, x.transpose(1, 2), beta=0.5, alpha=3), (2, 3)),
    "linear of sequences": Case(lambda x: F.linear(x, numbers(4, 3), numbers(4)).square(), (2, 3)),
    "linear with a weight of the batch": Case(lambda x: F.linear(x, x[0]).square() + F.linear(x, x.sum(0)), (2, 3)),
    "linear over a split feature": Case(batch_last(lambda x: F.linear(x, x[0]).square()), (2, 3)),
    "convolution": Case(lambda x: F.conv2d(x, numbers(4, 2, 3, 3), numbers(4), padding=1).square(), (2, 4, 4)),
    "transposed convolution": Case(lambda x: F.conv_transpose1d(x, numbers(2, 3, 2), stride=2).square(), (2, 4)),
    "convolution in groups": Case(lambda x: F.conv1d(x, x.sum(0)[:, None, :3], groups=2), (2, 6)),
    "embedding": Case(lambda x: F.embedding(labels_of(x, 5), x.sum(0), padding_idx=1), (5, 3)),
    "embedding whose gradients are scaled by frequency": Case(
        lambda x: F.embedding(labels_of(x, 5), x.sum(0), scale_grad_by_freq=True), (5, 3)
    ),
    "lstm": Case(run_recurrent("LSTM"), (12,)),
    "gru": Case(run_recurrent("GRU"), (12,)),
}
NORMALIZATIONS = {
    "layer norm": Case(lambda x: F.layer_norm(x, (3,), x.sum((0, 1)), numbers(3)).square(), (2, 3)),
    "layer norm over two dims": Case(lambda x: F.layer_norm(x, (2, 3)).square(), (2, 3)),
    "rms norm": Case(lambda x: F.rms_norm(x, (3,), x.sum((0, 1))).square(), (2, 3)),
    "group norm": Case(lambda x: F.group_norm(x, 2, x.sum((0, 2)), numbers(4)).square(), (4, 3)),
    "batch norm": Case(
        lambda x: F.batch_norm(x.exp(), numbers(4), numbers(4) + 2, x.sum((0, 2)), numbers(4), training=True).square(),
        (4, 3),
    ),
    "batch norm without statistics": Case(lambda x: F.batch_norm(x.exp(), None, None, training=True).square(), (4,)),
    "batch norm with constants": Case(
        lambda x: F.batch_norm(x, numbers(4), numbers(4) + 2, x.sum((0, 2)), training=False).square(), (4, 3)
    ),
    "batch norm on a constant weight": Case(
        lambda x: F.batch_norm(x.exp(), None, None, numbers(4), training=True).square(), (4, 2, 2)
    ),
}
LOSSES = {
    "mean loss": Case(lambda x: F.nll_loss(x, labels_of(x, 6))),
    "sum of losses": Case(lambda x: F.nll_loss(x, labels_of(x, 6), reduction="sum").square()),
    "loss per row": Case(lambda x: F.nll_loss(x, labels_of(x, 6), reduction="none").square()),
    "loss with ignored and weights": Case(
        lambda x: F.nll_loss(x, labels_of(x, 6), weight=numbers(6) + 2, ignore_index=3).square()
    ),
    "loss of pictures": Case(
        lambda x: F.cross_entropy(x, labels_of(x, 4)[:, None, None].expand(-1, 2, 3).contiguous()).square(), (4, 2, 3)
    ),
    "loss of pictures per pixel": Case(
        lambda x: F.cross_entropy(x, (x[:, 0] > 0).long(), reduction="none", ignore_index=0).square(), (4, 2, 3)
    ),
    "loss of a batch on the classes' dim": Case(lambda x: F.nll_loss(x.t(), numbers(6).abs().long())),
}
ATTENTION = {
    "attention": Case(attention(), (2, 4, 9)),
    "causal attention": Case(attention(causal=True), (2, 4, 9)),
    "attention with a mask": Case(attention(masked="boolean"), (2, 4, 9)),
    "attention with a bias": Case(attention(masked="positions"), (2, 4, 9)),
    "attention with a bias per row": Case(lambda x: attention(masked="rows")(x), (2, 4, 9)),
}
IMAGES = {
    "max pool": Case(lambda x: F.max_pool2d(x, 2).square(), (2, 4, 4)),
    "average pool": Case(lambda x: F.avg_pool2d(x, 2, padding=1).square(), (2, 4, 4)),
    "adaptive average pool": Case(lambda x: F.adaptive_avg_pool2d(x, (2, 3)).square(), (2, 4, 4)),
    "adaptive max pool": Case(lambda x: F.adaptive_max_pool2d(x, (2, 3)).square(), (2, 4, 4)),
    "nearest": Case(lambda x: F.interpolate(x, scale_factor=2, mode="nearest").square(), (2, 3, 3)),
    "bilinear": Case(lambda x: F.interpolate(x, size=(5, 4), mode="bilinear").square(), (2, 3, 3)),
    "bicubic": Case(lambda x: F.interpolate(x, size=(5, 4), mode="bicubic").square(), (2, 3, 3)),
    "reflection pad": Case(lambda x: F.pad(x, (1, 1, 1, 0), mode="reflect").square(), (2, 3, 3)),
    "replication pad": Case(lambda x: F.pad(x, (1, 1, 1, 0), mode="replicate").square(), (2, 3, 3)),
    "pixel shuffle": Case(lambda x: F.pixel_shuffle(x, 2).square(), (4, 2, 2)),
    "pixel shuffle of the batch as channels": Case(
        batch_second(lambda x: F.pixel_shuffle(x, 2).square()), (3, 2, 2), 8
    ),
    "pixel unshuffle": Case(lambda x: F.pixel_unshuffle(x, 2).square(), (1, 4, 4)),
    "max pool in space": Case(lambda x: F.max_pool3d(x, 2).square(), (2, 4, 4, 4)),
    "average pool in space": Case(lambda x: F.avg_pool3d(x, 2).square(), (2, 4, 4, 4)),
    "adaptive pool in space": Case(lambda x: F.adaptive_avg_pool3d(x, 3).square(), (2, 4, 4, 4)),
    "pool of the batch as channels": Case(batch_second(lambda x: F.max_pool2d(x, 2).square()), (2, 4, 4)),
}
INDEXING = {
    "gather": Case(lambda x: x.gather(1, labels_of(x, 6)[:, None]).square() + x.gather(0, (x > 0).long()).sum()),
    "scatter": Case(lambda x: torch.zeros_like(x).scatter(1, labels_of(x, 6)[:, None], x[:, :1]).square()),
    "scatter of a value": Case(lambda x: x.scatter(1, labels_of(x, 6)[:, None], 2.0).square()),
    "scatter add": Case(lambda x: x.scatter_add(1, (x > 0).long(), x.square()).square()),
    "scatter add onto the batch": Case(lambda x: x.scatter_add(0, (x > 0).long(), x.square()).square()),
    "index select": Case(lambda x: x.index_select(1, torch.tensor([0, 5, 5])).square()),
    "index select of rows": Case(lambda x: x.index_select(0, torch.tensor([0, 5, 5, 1])).square()),
    "index select by the batch": Case(lambda x: x.sum(0).index_select(0, labels_of(x, 6)).square()),
    "index": Case(lambda x: x[:, torch.tensor([0, 5, 5])].square()),
    "index by the batch": Case(lambda x: x.sum(0)[labels_of(x, 6)].square()),
    "index of rows": Case(lambda x: x[torch.tensor([3, 0, 0])].square()),
    "index by two": Case(lambda x: x.sum(0)[labels_of(x, 2), labels_of(x, 3)].square(), (2, 3)),
    "index of rows and columns": Case(lambda x: x[torch.arange(len(x)), labels_of(x, 6)].square()),
    "unsafe index": Case(lambda x: aten._unsafe_index(x.sum(0), [labels_of(x, 6)]).square()),
    "index put": Case(lambda x: x.sum(0).index_put((labels_of(x, 6),), x[:, 0], accumulate=True).square()),
    "index put over": Case(lambda x: x.index_put((torch.tensor([1, 4]),), numbers(2, 6)).square()),
    "unsafe index put": Case(
        lambda x: aten._unsafe_index_put(x.sum(0), [labels_of(x, 6)], x[:, 0], True).square(),
    ),
}
RANDOM = {
    "dropout": Case(lambda x: F.dropout(x, 0.4) + F.dropout(x.t(), 0.3).t()),
    "dropout of features": Case(lambda x: F.dropout1d(x, 0.4) + F.feature_alpha_dropout(x, 0.2), (4, 3)),
    "alpha dropout": Case(lambda x: F.alpha_dropout(x, 0.4, training=True)),
    "native dropout": Case(lambda x: torch.native_dropout(x, 0.4, True)[0]),
    "dropout of a partial sum": Case(lambda x: F.dropout(x.sum(0), 0.4) * x),
    "draws like the batch": Case(
        lambda x: x * torch.rand_like(x) + torch.randn_like(x.t()).t() + torch.randint_like(x, 9) * x
    ),
    "whole numbers like the batch": Case(lambda x: x * torch.randint_like(x, 2, 9, dtype=torch.int64)),
    "draws in place": Case(
        lambda x: (
            x * torch.empty_like(x).uniform_(1, 2)
            + torch.empty_like(x).normal_(1, 2)
            + torch.empty_like(x).exponential_()
            + torch.empty_like(x).cauchy_()
            + torch.empty_like(x).log_normal_()
            + torch.empty_like(x).geometric_(0.4)
            + torch.empty_like(x).random_()
            + torch.empty_like(x).random_(9)
            + torch.empty_like(x).bernoulli_(0.3)
            + x.detach().bernoulli(0.3)
        )
    ),
    "fresh draws": Case(
        lambda x: (
            x * torch.rand(6)
            + torch.randn(6)
            + torch.randint(9, (6,))
            + torch.randint(2, 9, (6,))
            + torch.randperm(6)
            + torch.normal(0.0, 1.0, (6,))
        )
    ),
    "draws by value": Case(
        lambda x: (
            x * torch.bernoulli(x.detach().sigmoid())
            + torch.normal(x.detach(), 1.0)
            + torch.normal(0.0, x.detach().abs())
            + torch.normal(x.detach(), x.detach().abs())
            + torch.poisson(x.detach().abs())
            + torch.multinomial(x.detach().abs(), 6, replacement=True)
        )
    ),
}
POINTWISE = {
    "log sigmoid": Case(lambda x: F.logsigmoid(x).square()),
    "activations": Case(
        lambda x: F.gelu(x) + F.silu(x) + F.elu(x) + F.leaky_relu(x) + F.softplus(x) + F.hardtanh(x) + F.mish(x)
    ),
    "broadcasting": Case(lambda x: x * x.sum(0) + x[:, :1] - x.sum() + x / x.abs().sum(1, keepdim=True)),
    "partial sums together": Case(lambda x: (x.sum(0) * 3 - x.square().sum(0) / 2 - (-x.sum(0))).square()),
    "a partial sum and a constant": Case(lambda x: (x.sum(0) + numbers(6)).square() + (x.sum(0) - 1).square()),
    "product of partial sums": Case(lambda x: x.sum(0) * x.square().sum(0)),
    "clamp and where of a partial sum": Case(lambda x: x.sum(0).clamp(-1, 1) + torch.where(x.sum(0) > 0, x.mean(0), 2)),
    "casts of partial sums": Case(lambda x: (x.sum(0).float().double() - x.sum(0).int()) * x),
    "masks": Case(lambda x: x.masked_fill(x > 1, -1.0).square() + torch.where(x > 0, x, x.square())),
    "new tensors": Case(lambda x: x + x.new_zeros(6) + x.sum(0).new_ones(6) + x.new_full((6,), 2)),
    "new tensors that are filled": Case(lambda x: x * x.new_empty(6).fill_(3)),
    "prelu": Case(lambda x: F.prelu(x, x.sum((0, 2)).abs()[:3]).square(), (3, 2)),
}
CASES = VIEWS | REDUCTIONS | MATRICES | NORMALIZATIONS | LOSSES | ATTENTION | IMAGES | INDEXING | RANDOM | POINTWISE


@functools.cache
def check_case(name: str, ranks: int) -> Outcome:
    """Return the outcome of a case, after asserting that it equals one device's; each case runs once."""
    return check_function(CASES[name], ranks)


def check_function(case: Case, ranks: int) -> Outcome:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Module()
        model.factor = nn.Parameter(torch.rand(case.shape) + 0.5)
        return assert_same_as_plain(
            lambda x: weighted(case.function(x * model.factor)),
            {"model": model},
            [torch.randn(case.rows, *case.shape)],
            ranks,
        )
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.ci_sample(120)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [3, 4, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (2, 7))])
def test_an_operator_on_shards_has_the_values_and_gradients_of_one_device(name, ranks):
    check_case(name, ranks)


def is_sharded(outcome: Outcome, node: Any) -> bool:
    """Return whether an operator works on shards, or is lowered in a special way for them."""
    strategy = outcome.sharded.strategies[node]
    placements = (*strategy.inputs, *strategy.outputs)
    return strategy.lower is not None or any(not isinstance(item, Replicate) for item in placements)


def test_an_empty_cache_does_not_gather_what_is_joined_to_it():
    outcome = check_case("cat with an empty cache", 3)
    assert [record.reason for record in outcome.local.collectives if record.gathered] == []


CUDA_ONLY = {
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}
DRAWN_REPLICATED = {
    aten.rand.default,
    aten.randn.default,
    aten.randint.default,
    aten.randint.low,
    aten.randperm.default,
    aten.normal.float_float,
    aten.bernoulli.default,
    aten.multinomial.default,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
    aten.poisson.default,
}


def test_some_case_covers_every_rule_on_shards():
    sharded_targets, replicated_targets = set(), set()
    for name in CASES:
        outcome = check_case(name, 3)
        for node in outcome.sharded.strategies:
            (sharded_targets if is_sharded(outcome, node) else replicated_targets).add(node.target)
    assert {operator for operator in SHARDING_RULES if operator not in sharded_targets} == CUDA_ONLY | DRAWN_REPLICATED
    assert replicated_targets >= DRAWN_REPLICATED


WITHOUT_RULE = {
    "singular values": (lambda x: torch.linalg.svdvals(x), "aten._linalg_svd.default"),
    "distances": (lambda x: torch.cdist(x, x.flip(0) + 1), "aten._cdist_forward.default"),
    "windows": (lambda x: x.unfold(0, 3, 2).square(), "aten.unfold.default"),
    "roll": (lambda x: x.roll(2, 0).square(), "aten.roll.default"),
    "median": (lambda x: x.median(0)[0].square(), "aten.median.dim"),
}


@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_an_operator_without_a_rule_is_exact_and_reported_with_its_line(name):
    function, operator = WITHOUT_RULE[name]
    outcome = check_function(Case(function), 3)
    reported = {str(node.target): node.meta["line"] for node in outcome.sharded.nodes_without_rule}
    assert reported[operator].startswith(f"{__file__}:")
