"""PyTorch's attention layers compute time-first and merge time and batch: their values stay split all the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simulated_ranks import assert_same_as_plain
from torch import Tensor, nn
from torch.nn import functional

PLAIN_LINEAR = functional.linear


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(11)
    yield
    torch.set_default_dtype(torch.float32)


Call = Callable[[Any, Tensor, Tensor], Tensor]
"""Calls a layer with inputs of shape (batch, 5, 8) and (batch, 3, 8)."""


def causal_mask(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


def attention(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(8, 2, batch_first=True, **options)


def with_weights(layer: Any, x: Tensor, _: Tensor) -> Tensor:
    values, weights = layer(x, x, x)
    return values + weights.mean()


LAYERS: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "without weights": (attention(), lambda layer, x, _: layer(x, x, x, need_weights=False)[0]),
    "with weights": (attention(), with_weights),
    "weights of each head": (attention(), lambda layer, x, _: layer(x, x, x, average_attn_weights=False)[1]),
    "without biases": (attention(bias=False), lambda layer, x, _: layer(x, x, x)[0]),
    "to another sequence": (attention(), lambda layer, x, y: layer(x, y, y, need_weights=False)[0]),
    "to other widths": (
        attention(kdim=3, vdim=5),
        lambda layer, x, y: layer(x, y[..., :3], y[..., :5], need_weights=False)[0],
    ),
    "causal": (
        attention(),
        lambda layer, x, _: layer(x, x, x, attn_mask=causal_mask(5), is_causal=True, need_weights=False)[0],
    ),
    "padded": (attention(), lambda layer, x, y: layer(x, y, y, key_padding_mask=y[..., 0] > 1)[0]),
    "time first": (
        lambda: nn.MultiheadAttention(8, 2),
        lambda layer, x, _: layer(*[x.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1),
    ),
    "one head": (lambda: nn.MultiheadAttention(8, 1, batch_first=True), with_weights),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        lambda layer, x, _: layer(x),
    ),
    "decoder": (
        lambda: nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=True),
        lambda layer, x, y: layer(x, y, tgt_mask=causal_mask(5)),
    ),
}


IN_CI = ("with weights", "to other widths", "decoder")
CASES = [
    pytest.param(name, ranks, marks=[] if ranks == 3 and name in IN_CI else pytest.mark.exhaustive)
    for name in LAYERS
    for ranks in (2, 3, 4, 7)
]


@pytest.mark.parametrize(("name", "ranks"), CASES)
@pytest.mark.ci_sample(1)
def test_an_attention_layer_is_exact_and_gathers_nothing(name: str, ranks: int) -> None:
    make, call = LAYERS[name]
    model = make()
    inputs = [torch.randn(7, 5, 8), torch.randn(7, 3, 8)]
    outcome = assert_same_as_plain(lambda x, y: call(model, x, y).square().mean(), {"model": model}, inputs, ranks)
    assert [f"{move.reason} at {move.line}" for move in outcome.local.collectives if move.gathered] == []
    assert functional.linear is PLAIN_LINEAR


@pytest.mark.parametrize(
    "name",
    [
        "to another sequence",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("with weights", "encoder")),
    ],
)
def test_one_program_of_an_attention_layer_serves_other_sizes(name: str) -> None:
    make, call = LAYERS[name]
    model = make()
    outcome = assert_same_as_plain(
        lambda x, y: call(model, x, y).square().mean(),
        {"model": model},
        [torch.randn(9, 6, 8), torch.randn(9, 3, 8)],
        3,
        captured_at=[torch.randn(6, 5, 8), torch.randn(6, 3, 8)],
    )
    assert [move.reason for move in outcome.local.collectives if move.gathered] == []


def test_attention_under_autocast_casts_as_pytorch_does_and_gathers_nothing() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True).float()

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            values, _ = model.self_attn(x, x, x)
            return model(x).float().square().mean() + values.float().square().mean(), values

    outcome = assert_same_as_plain(step, {"model": model}, [torch.randn(7, 5, 8).float()], 3, bound=0.03)
    assert outcome.results[2].dtype == torch.bfloat16
    gathered = [move for move in outcome.local.collectives if move.gathered]
    assert [move.reason for move in gathered if move.purpose == "input"] == []


def test_dropout_in_attention_is_exact() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 12, 0.3, batch_first=True)
    assert_same_as_plain(lambda x: model(x).square().mean(), {"model": model}, [torch.randn(7, 5, 8)], 3)


def test_a_second_gradient_through_attention_is_exact() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)

    def penalty(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        values, _ = model(x, x, x)
        (gradient,) = torch.autograd.grad(values.square().sum(), x, create_graph=True)
        return gradient.norm(dim=-1).mean() + F.mse_loss(values, x)

    assert_same_as_plain(penalty, {"model": model}, [torch.randn(7, 5, 8)], 3, bound=1e-10)


def test_an_error_in_attention_leaves_linear_as_it_was() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    with pytest.raises(AssertionError, match="was expecting embedding dimension"):
        assert_same_as_plain(lambda x: model(x, x, x)[0].mean(), {"model": model}, [torch.randn(6, 5, 4)], 2)
    assert functional.linear is PLAIN_LINEAR
