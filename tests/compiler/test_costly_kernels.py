"""Kernels that save time beside PyTorch's own: equal to the last bit where PyTorch's numbers are, and nothing else."""

import pytest
import torch
import torch.nn.functional as F
from simulated_ranks import assert_same_as_plain
from support.devices import get_random_state
from torch import nn

from rankless.compiler.ir.custom_ops import run_linear
from rankless.compiler.ir.local_kernels import ADVANCE_CHUNK, advance_generator, draw_dropout_mask

CPU = torch.device("cpu")
SHAPES = {
    "rows": torch.empty(7, 5, 3),
    "dim 1 outermost": torch.empty(5, 7, 3).transpose(0, 1),
    "channels last": torch.empty(5, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "one row": torch.empty(1, 9),
    "dims of one": torch.empty(300, 1, 2),
    "more than a chunk": torch.empty(ADVANCE_CHUNK // 2, 3),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_part_of_a_dropout_mask_is_that_of_the_whole_and_leaves_the_same_state(name: str):
    like = SHAPES[name]
    example = (tuple(like.shape), like.stride(), torch.float32)
    torch.manual_seed(3)
    whole = torch.empty_like(like, dtype=torch.bool).bernoulli_(0.7)
    state = get_random_state()
    for dim, size in enumerate(like.shape):
        for start, length in ((0, size // 2), (size // 2, size - size // 2), (size, 0), (0, size)):
            torch.manual_seed(3)
            part = draw_dropout_mask(example, CPU, 0.3, ((dim, start, length),))
            assert torch.equal(part, whole.narrow(dim, start, length))
            assert torch.equal(get_random_state(), state)


@pytest.mark.parametrize("count", [0, 1, 311, 624, ADVANCE_CHUNK + 5])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64], ids=str)
def test_an_advanced_generator_is_where_bernoulli_draws_leave_it(count: int, dtype: torch.dtype):
    torch.manual_seed(1)
    torch.empty(count, dtype=dtype).bernoulli_(0.3)
    state = get_random_state()
    torch.manual_seed(1)
    advance_generator(count)
    assert torch.equal(get_random_state(), state)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(5, 7, 4).transpose(0, 1),
        torch.randn(2, 3, 5, 4).permute(2, 0, 1, 3),
        torch.randn(5, 4).expand(3, 5, 4),
        torch.randn(3, 4, 5).transpose(1, 2),
        torch.randn(0, 3, 4).transpose(0, 1),
        torch.randn(5, 4),
        torch.randn(4),
    ],
    ids=lambda item: f"{list(item.shape)} {item.stride()}",
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_of_rows_that_do_not_follow_each_other_is_right(x: torch.Tensor, has_bias: bool):
    weight, bias = torch.randn(6, 4), torch.randn(6) if has_bias else None
    found = run_linear(x, weight, bias)
    torch.testing.assert_close(found, F.linear(x, weight, bias))
    assert found.is_contiguous()


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_batch_norm_is_right_where_some_ranks_have_no_rows(rows: int):
    layers = nn.ModuleDict({"convolution": nn.Conv2d(3, 3, 1), "norm": nn.BatchNorm2d(3)}).double()
    batch = torch.randn(rows, 3, 4, 4, dtype=torch.float64)

    def loss(x):
        return layers["norm"](layers["convolution"](x)).sin().mean()

    assert_same_as_plain(loss, {"layers": layers}, [batch], 4, splits_few_rows=True)
