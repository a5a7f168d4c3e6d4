"""allreduce and reducescatter against sums computed in one process."""

import pytest
import torch
from support.horovod_ranks import on_ranks

WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (5,), (3, 4), (2, 3, 4), (0, 3)]


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A rank's tensor: small whole numbers, which every dtype holds exactly."""
    generator = torch.Generator().manual_seed(1000 + rank)
    low = 1 if dtype is torch.uint8 else -6
    return torch.randint(low, 7, shape, generator=generator).to(dtype)


def in_every_way(hvd, shapes, dtypes):
    for dtype in dtypes:
        for shape in shapes:
            own = part(hvd.rank(), shape, dtype)
            whole = sum(part(rank, shape, dtype).double() for rank in range(hvd.size()))
            mean = whole / hvd.size()
            if not dtype.is_floating_point:
                mean = mean.trunc()
            for op, expected in ((hvd.Sum, whole), (hvd.Average, mean)):
                for tensor in (
                    hvd.allreduce(own, op=op),
                    hvd.synchronize(hvd.allreduce_async(own, op=op)),
                    hvd.allreduce_(own.clone(), op=op),
                    hvd.synchronize(hvd.allreduce_async_(own.clone(), op=op)),
                ):
                    torch.testing.assert_close(tensor, expected.to(dtype))
            assert torch.equal(own, part(hvd.rank(), shape, dtype))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.ci_sample(1)
def test_allreduce_sums_and_averages_every_dtype_and_shape(size):
    on_ranks(size, in_every_way, SHAPES, [*WHOLE, *FLOATING])


def extremes(hvd, size):
    parts = [part(rank, (size,)) for rank in range(hvd.size())]
    stacked = torch.stack(parts)
    own = parts[hvd.rank()]
    for op, expected in (
        (hvd.Min, stacked.amin(0)),
        (hvd.Max, stacked.amax(0)),
        (hvd.Product, stacked.prod(0)),
    ):
        assert torch.equal(hvd.allreduce(own, op=op), expected)


@pytest.mark.parametrize("size", [7, 40_000])
def test_allreduce_computes_minimum_maximum_and_product(size):
    on_ranks(3, extremes, size)


def booleans(hvd):
    own = torch.tensor([True, False, hvd.rank() == 0])
    return hvd.allreduce(own, op=hvd.Sum).tolist(), hvd.allreduce(own, op=hvd.Min).tolist()


def test_booleans_are_reduced_too():
    assert on_ranks(2, booleans) == [([True, False, True], [True, False, False])] * 2


def whole_averages(hvd):
    own = torch.tensor([1, 2, -3]) if hvd.rank() == 0 else torch.tensor([2, 3, -2])
    return hvd.allreduce(own).tolist()


def test_an_average_of_integers_truncates_toward_zero():
    assert on_ranks(2, whole_averages) == [[1, 2, -2]] * 2


def scaled(hvd):
    own = part(hvd.rank(), (6,))
    whole = sum(part(rank, (6,)) for rank in range(hvd.size()))
    result = hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert torch.equal(result, whole * 1.5)
    result = hvd.grouped_allreduce([own, own], op=hvd.Average, prescale_factor=2.0, postscale_factor=0.25)
    for each in result:
        torch.testing.assert_close(each, whole / hvd.size() * 0.5)
    handle = hvd.reducescatter_async(own, op=hvd.Sum, prescale_factor=2.0)
    assert torch.equal(hvd.synchronize(handle), (whole * 2)[hvd.rank() * 3 : hvd.rank() * 3 + 3])


def test_factors_scale_before_and_after():
    on_ranks(2, scaled)


def grouped(hvd):
    shapes = [(3,), (40, 1000), ()]
    own = [part(hvd.rank(), shape) for shape in shapes]
    whole = [sum(part(rank, shape) for rank in range(hvd.size())) for shape in shapes]
    handle = hvd.grouped_allreduce_async(own, op=hvd.Sum, name="these")
    for tensors in (hvd.synchronize(handle), hvd.grouped_allreduce(own, op=hvd.Sum)):
        assert isinstance(tensors, list)
        assert all(torch.equal(tensor, expected) for tensor, expected in zip(tensors, whole, strict=True))
    copies = [tensor.clone() for tensor in own]
    results = hvd.grouped_allreduce_(copies, op=hvd.Sum)
    assert all(result is copy for result, copy in zip(results, copies, strict=True))
    hvd.synchronize(hvd.grouped_allreduce_async_(copies, average=False))
    assert all(torch.equal(copy, tensor * hvd.size()) for copy, tensor in zip(copies, whole, strict=True))
    alone = hvd.synchronize(hvd.grouped_allreduce_async([own[0]], op=hvd.Sum))
    assert isinstance(alone, list)
    assert torch.equal(alone[0], whole[0])


def test_groups_are_reduced_together_and_return_lists():
    on_ranks(2, grouped)


def scattered(hvd):
    n, rank = hvd.size(), hvd.rank()
    for rows in (0, 1, 3, 4, 9):
        own = part(rank, (rows, 2))
        whole = sum(part(other, (rows, 2)) for other in range(n))
        each, more = divmod(rows, n)
        start = rank * each + min(rank, more)
        expected = whole[start : start + each + (rank < more)]
        assert torch.equal(hvd.reducescatter(own, op=hvd.Sum), expected)
        torch.testing.assert_close(hvd.reducescatter(own), expected / n)
        for result in hvd.grouped_reducescatter([own, own * 2], op=hvd.Sum)[:1]:
            assert torch.equal(result, expected)
        second = hvd.synchronize(hvd.grouped_reducescatter_async([own, own * 2], op=hvd.Sum))[1]
        assert torch.equal(second, expected * 2)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_reducescatter_returns_one_row_more_on_the_first_ranks(size):
    on_ranks(size, scattered)


def compressed(hvd):
    own = torch.tensor([1.5, 2049.0, 1 / 3]) * (hvd.rank() + 1)
    result = hvd.allreduce(own, op=hvd.Sum, compression=hvd.Compression.fp16)
    travelled = sum((torch.tensor([1.5, 2049.0, 1 / 3]) * (rank + 1)).half() for rank in range(hvd.size()))
    whole = hvd.allreduce(torch.tensor([2049]), op=hvd.Sum, compression=hvd.Compression.fp16)
    return result.dtype, torch.equal(result, travelled.float()), whole.tolist()


def test_fp16_compression_sends_float16_and_restores_the_dtype():
    assert on_ranks(2, compressed) == [(torch.float32, True, [4098])] * 2
