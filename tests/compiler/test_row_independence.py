"""The experiment grants a division only to operators whose rows are independent."""

import pytest
import torch
from support.devices import get_random_state
from torch import Tensor

from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.probing.row_independence import find_output_dims

CPU = torch.device("cpu")
CALLS = [0]


def value(*shape: int, dtype: torch.dtype = torch.float64, transposed: bool = False) -> LogicalValue:
    made = torch.empty(shape, dtype=dtype)
    made = made.mT.contiguous().mT if transposed else made
    return LogicalValue(tuple(made.shape), tuple(made.stride()), dtype, CPU)


ROWS = value(6, 4)
MATRICES = value(6, 4, 4)
INTEGERS = value(6, 4, dtype=torch.int64)

GRANTED = {
    "elementwise": (lambda x: x.exp(), [ROWS], (0,), (0,)),
    "elementwise, columns": (lambda x: x.exp(), [ROWS], (1,), (1,)),
    "elementwise, transposed": (lambda x: x.exp(), [value(6, 4, transposed=True)], (0,), (0,)),
    "sum of a row": (lambda x: x.sum(1), [ROWS], (0,), (0,)),
    "running sum in a row": (lambda x: x.cumsum(1), [ROWS], (0,), (0,)),
    "softmax of a row": (lambda x: x.softmax(1), [ROWS], (0,), (0,)),
    "sorted rows": (lambda x: x.sort(1), [ROWS], (0,), (0, 0)),
    "transposed": (lambda x: x.t(), [ROWS], (0,), (1,)),
    "transposed squares": (lambda x: x.t(), [value(6, 6)], (0,), (1,)),
    "product with a whole matrix": (lambda x, y: x @ y, [ROWS, value(4, 5)], (0, None), (0,)),
    "outer product": (lambda x, y: x[:, None] * y, [value(6), value(6)], (None, 0), (1,)),
    "both divided": (lambda x, y: x * y, [ROWS, ROWS], (0, 0), (0,)),
    "decompositions": (torch.linalg.svd, [MATRICES], (0,), (0, 0, 0)),
    "matrices that must be definite": (torch.linalg.cholesky, [MATRICES], (0,), (0,)),
    "float32": (lambda x: x @ x.mT, [value(6, 4, 4, dtype=torch.float32)], (0,), (0,)),
    "bfloat16": (lambda x: x.exp(), [value(6, 4, dtype=torch.bfloat16)], (0,), (0,)),
    "complex": (lambda x: x * x.conj(), [value(6, 4, dtype=torch.complex128)], (0,), (0,)),
    "integers": (lambda x: x * 2 + 1, [INTEGERS], (0,), (0,)),
    "booleans": (lambda x: ~x, [value(6, 4, dtype=torch.bool)], (0,), (0,)),
    "indices": (lambda x, y: x[y], [value(5, 3), value(6, dtype=torch.int64)], (None, 0), (0,)),
    "an absent result": (lambda x: (x * 2, None), [ROWS], (0,), (0, None)),
}


@pytest.mark.parametrize("name", GRANTED)
@pytest.mark.parametrize("parts", [2, 3])
def test_independent_rows_are_granted(name: str, parts: int):
    function, values, dims, expected = GRANTED[name]
    size = next(item.shape[dim] for item, dim in zip(values, dims, strict=True) if dim is not None)
    lengths = (size - parts + 1, *[1] * (parts - 1))
    assert find_output_dims(lambda tensors: function(*tensors), values, dims, lengths) == expected


def count_calls(x: Tensor) -> Tensor:
    CALLS[0] += 1
    return x + CALLS[0]


def only_rows_after_the_first_see_it(x: Tensor) -> Tensor:
    changed = x.clone()
    changed[1:] += 1e-9 * x[:1]
    return changed


def spreads_what_is_not_a_number(x: Tensor) -> Tensor:
    return x + x.isnan().any() * 1.0


def change_argument(x: Tensor) -> Tensor:
    return x.mul_(2)


def in_order(x: Tensor) -> bool:
    return len(x) > 3 and bool((x[1:] >= x[:-1]).all()) and not bool((x[1:] == x[:-1]).any())


REFUSED = {
    "sum of all": (lambda x: x.sum(), [ROWS], (0,)),
    "sum over the rows": (lambda x: x.sum(0), [ROWS], (0,)),
    "sum over the rows, a square": (lambda x: x.sum(0), [value(6, 6)], (0,)),
    "running sum over the rows": (lambda x: x.cumsum(0), [ROWS], (0,)),
    "softmax over the rows": (lambda x: x.softmax(0), [ROWS], (0,)),
    "mean of the batch taken off": (lambda x: x - x.mean(0), [ROWS], (0,)),
    "largest entry of the batch": (lambda x: x / x.abs().amax(), [ROWS], (0,)),
    "sorted batch": (lambda x: x.sort(0)[0], [ROWS], (0,)),
    "reversed batch": (lambda x: x.flip(0), [ROWS], (0,)),
    "rolled batch": (lambda x: x.roll(1, 0), [ROWS], (0,)),
    "the number of a row": (lambda x: x * torch.arange(float(len(x)))[:, None], [ROWS], (0,)),
    "how many rows there are": (lambda x: x / len(x), [ROWS], (0,)),
    "a size that is a number": (lambda x: x.view(6, 2, 2), [ROWS], (0,)),
    "all pairs": (lambda x: x @ x.t(), [ROWS], (0,)),
    "distances": (torch.pdist, [ROWS], (0,)),
    "product over the divided dim": (lambda x, y: x @ y, [ROWS, value(4, 5)], (1, 0)),
    "one of two divided": (lambda x, y: x * y, [ROWS, ROWS], (0, None)),
    "random numbers": (torch.rand_like, [ROWS], (0,)),
    "noise": (lambda x: x + torch.randn(()), [ROWS], (0,)),
    "a counter": (count_calls, [ROWS], (0,)),
    "an argument changed": (change_argument, [ROWS], (0,)),
    "a constant": (torch.zeros_like, [ROWS], (0,)),
    "the first row in the others": (only_rows_after_the_first_see_it, [ROWS], (0,)),
    "whether any entry is no number": (spreads_what_is_not_a_number, [ROWS], (0,)),
    "which entries differ from zero": (lambda x: x.nonzero(), [ROWS], (0,)),
    "a number": (lambda x: x.shape[0], [ROWS], (0,)),
    "a sparse result": (lambda x: x.to_sparse(), [ROWS], (0,)),
    "always an error": (lambda x: x.view(5, 5), [ROWS], (0,)),
    "an error for a part": (lambda x: x if len(x) > 3 else x.view(99), [ROWS], (0,)),
    "another dtype for a part": (lambda x: x if len(x) > 3 else x.float(), [ROWS], (0,)),
    "integers summed over the rows": (lambda x: x - x.sum(0), [INTEGERS], (0,)),
    "any of the rows": (lambda x: x | x.any(0), [value(6, 4, dtype=torch.bool)], (0,)),
    "a result absent for a part": (lambda x: (x, x if len(x) > 3 else None), [ROWS], (0,)),
    "one of two results": (lambda x: (x * 2, x.sum(0)), [ROWS], (0,)),
    "one row": (lambda x: x.exp(), [value(1, 4)], (0,)),
    "how many rows are equal": (lambda x: x * (x[:, None] == x[None]).all(-1).sum(1)[:, None], [ROWS], (0,)),
    "whether a row is a copy": (lambda x: x * 1.0 if len(x.unique(dim=0)) == len(x) else x * 2.0, [ROWS], (0,)),
    "whether the rows are in order": (lambda x: x * 2.0 if in_order(x) else x * 1.0, [ROWS], (0,)),
    "whether the rows fall": (lambda x: x * 2.0 if in_order(-x) else x * 1.0, [ROWS], (0,)),
    "how many rows are zero": (lambda x: x + (x == 0).all(1).sum(), [ROWS], (0,)),
    "a row beyond a bound": (lambda x: x * 2.0 if bool((x > 1000).any()) else x * 1.0, [ROWS], (0,)),
    "how many rows share the largest": (lambda x: x * (x[:, :1] == x[:, :1].max()).sum(), [ROWS], (0,)),
    "how many classes there are": (lambda x: x * 1.0 + (len(x.unique()) < 2), [ROWS], (0,)),
    "how many classes of integers": (lambda x: x + (len(x.unique()) < 3), [INTEGERS], (0,)),
    "whether the number of rows is even": (lambda x: x * (len(x) % 2), [ROWS], (0,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_depend_on_others_are_not_granted(name: str):
    function, values, dims = REFUSED[name]
    size = next(item.shape[dim] for item, dim in zip(values, dims, strict=True) if dim is not None)
    lengths = (size // 2, size - size // 2)
    assert find_output_dims(lambda tensors: function(*tensors), values, dims, lengths) is None


def test_a_rank_without_rows_is_not_granted():
    assert find_output_dims(lambda tensors: tensors[0].exp(), [ROWS], (0,), (6, 0)) is None


def test_the_script_s_generators_do_not_move():
    before = get_random_state()
    find_output_dims(lambda tensors: tensors[0].exp(), [ROWS], (0,), (3, 3))
    assert torch.equal(get_random_state(), before)
