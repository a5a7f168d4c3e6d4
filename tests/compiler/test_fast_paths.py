"""Attention layers in eval mode take the path that plain PyTorch takes: kernels whose values are others."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_ranks import run_on_simulated_ranks
from support.devices import DEVICE
from torch import Tensor, nn

ROWS, LENGTH, WIDTH = 6, 5, 8
LENGTHS = torch.tensor([5, 2, 3, 1, 4, 2])
PADDING = torch.arange(LENGTH) >= LENGTHS[:, None]
WITH_EMPTY_ROW = torch.arange(LENGTH) >= torch.tensor([5, 0, 3, 1, 4, 2])[:, None]
CAUSAL = torch.ones(LENGTH, LENGTH).triu(1).bool()
ADDED = torch.tensor([[0.5, 0.0, -1.0, 0.0, 2.0]]).repeat(LENGTH, 1)


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    given = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 16, "batch_first": True, "dropout": 0.3}
    return nn.TransformerEncoderLayer(**(given | options))


def encoder(count: int = 2, norm: nn.Module | None = None, check: bool = True, **options: Any) -> nn.Module:
    return nn.TransformerEncoder(layer(**options), count, norm=norm, mask_check=check)


def shifted_norm() -> nn.LayerNorm:
    norm = nn.LayerNorm(WIDTH)
    nn.init.constant_(norm.bias, 0.7)
    return norm


def with_hook(module: nn.Module) -> nn.Module:
    module.layers[0].register_forward_hook(lambda _module, _given, found: found * 1.5)
    return module


def pad(mask: Tensor) -> Callable[..., Any]:
    return lambda module, x: module(x, src_key_padding_mask=mask.to(x.device))


def attend(**options: Any) -> Callable[..., Any]:
    return lambda module, x: module(x, x, x, **options)


def with_flag(module: nn.Module, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return x
    return module(x)


FORMS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "encoder, padding": (encoder, pad(PADDING)),
    "encoder with a norm, padding": (lambda: encoder(norm=shifted_norm()), pad(PADDING)),
    "encoder, norm first, gelu": (lambda: encoder(norm_first=True, activation="gelu"), pad(PADDING)),
    "encoder, a sequence without positions": (encoder, pad(WITH_EMPTY_ROW)),
    "encoder, padding on the left": (encoder, pad(PADDING.flip(1))),
    "encoder, on the left, a sequence without positions": (encoder, pad(WITH_EMPTY_ROW.flip(1))),
    "encoder without a check of its mask": (lambda: encoder(check=False), pad(PADDING.flip(1))),
    "encoder, no position padded": (encoder, pad(PADDING & False)),
    "encoder, a mask of numbers": (encoder, pad(torch.zeros(ROWS, LENGTH).masked_fill(PADDING, -3.0))),
    "encoder with a hook": (lambda: with_hook(encoder()), pad(PADDING)),
    "encoder of odd heads": (lambda: encoder(nhead=1), pad(PADDING)),
    "encoder without nested tensors": (
        lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
        pad(PADDING),
    ),
    "layer, an additive mask": (layer, lambda module, x: module(x, src_mask=ADDED.to(x))),
    "layer, two masks": (layer, lambda module, x: module(x, CAUSAL, PADDING)),
    "layer, a causal hint without a mask": (layer, lambda module, x: module(x, is_causal=True)),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), attend()),
    "attention, padding": (
        lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        attend(key_padding_mask=WITH_EMPTY_ROW),
    ),
    "attention, weights of heads": (
        lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True),
        attend(attn_mask=CAUSAL, average_attn_weights=False),
    ),
    "attention without weights": (
        lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        attend(key_padding_mask=WITH_EMPTY_ROW, need_weights=False),
    ),
    "a script that asks whether it is compiled": (lambda: nn.Linear(WIDTH, WIDTH), with_flag),
}


def batch() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def assert_equal(found: list[Tensor], wanted: Any) -> None:
    tensors = [item for item in torch.utils._pytree.tree_leaves(wanted) if isinstance(item, Tensor)]
    assert len(found) == len(tensors)
    for ours, plain in zip(found, tensors, strict=True):
        assert (ours.dtype, ours.stride()) == (plain.dtype, plain.stride())
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.fixture(autouse=True)
def _ignore_warnings_of_nested_tensors():
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("form", FORMS)
def test_a_predicting_job_takes_the_path_of_a_plain_run(form: str):
    build, call = FORMS[form]
    module = build().double().eval()
    found = run_on_simulated_ranks(lambda x: call(module, x), {"model": module}, [batch()], 3, trains=False)
    with torch.no_grad():
        assert_equal(found.results, call(module, batch()))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "without gradients"])
@pytest.mark.parametrize("form", ["encoder, padding", "layer, an additive mask", "attention, padding"])
@pytest.mark.ci_sample(2)
def test_a_teacher_in_a_training_job_takes_the_path_of_a_plain_run(form: str, frozen: bool):
    build, call = FORMS[form]
    teacher, student = build().double().eval(), nn.Linear(WIDTH, WIDTH).double()
    if frozen:
        teacher.requires_grad_(False)

    def train(x: Tensor) -> Any:
        with torch.set_grad_enabled(frozen):
            goal = call(teacher, x)
        goal = goal[0] if isinstance(goal, tuple) else goal
        return (student(x) - goal.nan_to_num()).square().mean(), goal

    found = run_on_simulated_ranks(train, {"teacher": teacher, "student": student}, [batch()], 3)
    loss, goal = train(batch())
    assert_equal(found.results[1:], [loss.detach(), goal])


def test_an_encoder_that_trains_in_eval_mode_takes_the_path_of_a_plain_run():
    model = encoder().double().eval()

    def train(x: Tensor) -> Any:
        found = pad(PADDING)(model, x)
        return found.square().mean(), found

    found = run_on_simulated_ranks(train, {"model": model}, [batch()], 2)
    assert_equal(found.results[1:], [item.detach() for item in train(batch())])


@pytest.mark.parametrize("form", ["layer, an additive mask", "attention, padding"])
def test_a_fast_path_casts_under_autocast_as_in_a_plain_run(form: str):
    build, call = FORMS[form]
    module = build().eval()

    def predict(x: Tensor) -> Any:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return call(module, x)

    found = run_on_simulated_ranks(predict, {"model": module}, [batch().float()], 3, trains=False)
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(predict(batch().float()))
    for ours, eager in zip(found.results, wanted, strict=True):
        assert ours.dtype == eager.dtype
        torch.testing.assert_close(ours, eager, rtol=2**-5, atol=2**-5, equal_nan=True)


def test_a_switched_off_fast_path_stays_off():
    module = layer().double().eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        call = FORMS["layer, an additive mask"][1]
        found = run_on_simulated_ranks(lambda x: call(module, x), {"model": module}, [batch()], 3, trains=False)
        with torch.no_grad():
            assert_equal(found.results, call(module, batch()))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
