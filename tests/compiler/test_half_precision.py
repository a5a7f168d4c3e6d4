"""Half precision: strides as kernels give them, and sums over ranks that are rounded once."""

import pytest
import torch
from simulated_ranks import run_on_simulated_ranks
from torch import nn

from rankless.compiler.capture.capture import trace_half_precision_layouts

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
ELEMENTWISE = {
    "product": lambda a, b: a * b,
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "quotient": lambda a, b: a / b,
    "largest": torch.maximum,
    "choice": lambda a, b: torch.where(a > 1, a, b),
    "comparison": lambda a, b: a > b,
    "power": torch.pow,
    "interpolation": lambda a, b: torch.lerp(a, b, b),
    "of another type": lambda a, b: a * b.float(),
    "of one": lambda a, _: a.exp(),
}


@HALF
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_trace_gives_a_result_of_an_expanded_value_the_strides_of_the_kernel(name: str, dtype: torch.dtype):
    found = []
    with trace_half_precision_layouts():
        for device in ("meta", "cpu"):
            expanded = torch.ones(5, 5, dtype=dtype, device=device).t().unsqueeze(1).expand(5, 5, 5)
            found.append(ELEMENTWISE[name](expanded, torch.ones(5, 5, 5, dtype=dtype, device=device)).stride())
    assert found[0] == found[1]


PRODUCTS = {
    "dot": lambda a, b: torch.dot(a[:, 0], b[:, 0]),
    "vector": lambda a, b: torch.mv(a.t(), b[:, 0]),
    "matrices": lambda a, b: a.t() @ b,
    "batch of matrices": lambda a, b: torch.bmm(a.t()[None], b[None]),
    "linear": lambda a, b: nn.functional.linear(a.t(), b.t()),
    "einsum": lambda a, b: torch.einsum("bi,bj->ij", a, b),
}


@HALF
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_over_the_batch_is_rounded_once(name: str, dtype: torch.dtype):
    torch.manual_seed(3)
    a, b = torch.randn(2, 300, 4).to(dtype)
    a[150:] *= -1
    b[150:] = b[:150] + b[150:] * 2**-6  # the ranks' terms almost cancel

    def predict(left, right):
        return PRODUCTS[name](left, right)

    (found,) = run_on_simulated_ranks(predict, {}, [a, b], 2, trains=False).results
    exact = PRODUCTS[name](a.double(), b.double())
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


def test_terms_too_large_for_half_precision_have_the_right_sum():
    value = torch.full((4, 2), 60000.0, dtype=torch.float16)
    value[2:] *= -1

    def predict(left, right):
        return left.t() @ right

    (found,) = run_on_simulated_ranks(predict, {}, [value, torch.ones_like(value)], 2, trains=False).results
    assert torch.equal(found, torch.zeros_like(found))
