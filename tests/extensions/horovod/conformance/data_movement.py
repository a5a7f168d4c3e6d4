"""Allgather, broadcast, alltoall, reducescatter, barrier."""

import horovod.torch as hvd
import torch
from raised import raised

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
TYPES = (*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_gathering_rows():
    """allgather puts the ranks' rows one below the other; their numbers may differ, and be 0."""
    size, rank = hvd.size(), hvd.rank()
    for dtype in TYPES:
        given = torch.full((rank, 3), rank, dtype=torch.int64).to(dtype)
        expected = torch.cat([torch.full((other, 3), other, dtype=torch.int64).to(dtype) for other in range(size)])
        assert torch.equal(hvd.allgather(given), expected), dtype
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))
    assert hvd.allgather(torch.empty(0, 4)).shape == (0, 4)


def check_gathering_in_groups_and_asynchronously():
    """allgather_async, grouped_allgather, grouped_allgather_async."""
    size, rank = hvd.size(), hvd.rank()
    handle = hvd.allgather_async(torch.tensor([rank]), name="gather")
    assert hvd.synchronize(handle).tolist() == list(range(size))
    pair = [torch.tensor([rank]), torch.ones(rank + 1)]
    for first, second in (
        hvd.grouped_allgather(pair),
        hvd.synchronize(hvd.grouped_allgather_async(pair, name="gathers")),
    ):
        assert first.tolist() == list(range(size))
        assert len(second) == size * (size + 1) // 2


def check_the_gradient_of_gathering():
    """It is the average over ranks, of the rows that this one gave."""
    size, rank = hvd.size(), hvd.rank()
    given = torch.ones(rank + 1, 2, dtype=torch.float64, requires_grad=True)
    gathered = hvd.allgather(given)
    weights = torch.arange(gathered.numel(), dtype=torch.float64).reshape(gathered.shape) * (rank + 1)
    (gathered * weights).sum().backward()
    start = rank * (rank + 1) // 2
    mean = sum(range(1, size + 1)) / size
    whole = torch.arange(gathered.numel(), dtype=torch.float64).reshape(gathered.shape) * mean
    torch.testing.assert_close(given.grad, whole[start : start + rank + 1], rtol=1e-14, atol=0)


def check_a_scalar_cannot_be_gathered_with_a_gradient():
    """A tensor without dims raises IndexError on the way, which says what is missing."""
    for gradient in (True, False):
        given = torch.tensor(1.0, requires_grad=gradient)
        for call in (lambda given=given: hvd.allgather(given), lambda given=given: hvd.grouped_allgather([given])):
            assert "expected: a tensor with a first dimension" in raised(IndexError, call)


def check_broadcasting():
    """broadcast and its forms, from every rank, of every type."""
    for root in range(hvd.size()):
        for dtype in TYPES:
            given = torch.full((2, 3), hvd.rank() + 1).to(dtype)
            expected = torch.full((2, 3), root + 1).to(dtype)
            assert torch.equal(hvd.broadcast(given, root), expected)
            assert torch.equal(given, torch.full((2, 3), hvd.rank() + 1).to(dtype))
            assert torch.equal(hvd.synchronize(hvd.broadcast_async(given, root)), expected)
            assert hvd.broadcast_(given, root) is given
            assert torch.equal(given, expected)
            again = torch.full((2, 3), hvd.rank() + 1).to(dtype)
            hvd.synchronize(hvd.broadcast_async_(again, root))
            assert torch.equal(again, expected)
    assert hvd.broadcast(torch.tensor(float(hvd.rank())), 0).item() == 0.0


def check_the_gradient_of_broadcasting():
    """It is the average at the root, and nothing elsewhere."""
    given = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (hvd.broadcast(given, 1) * (hvd.rank() + 1)).sum().backward()
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    expected = torch.full((3,), mean if hvd.rank() == 1 else 0.0, dtype=torch.float64)
    torch.testing.assert_close(given.grad, expected, rtol=1e-14, atol=0)


def check_all_to_all():
    """Without splits rows are dealt out evenly; with them the received splits come too."""
    size, rank = hvd.size(), hvd.rank()
    found = hvd.alltoall(torch.arange(size * 2) + 100 * rank)
    assert found.tolist() == [100 * other + 2 * rank + number for other in range(size) for number in (0, 1)]
    splits = torch.tensor([(rank + other) % 3 for other in range(size)], dtype=torch.int32)
    given = torch.full((int(splits.sum()), 2), float(rank))
    rows, received = hvd.alltoall(given, splits)
    assert received.tolist() == [(other + rank) % 3 for other in range(size)]
    assert rows[:, 0].tolist() == [float(other) for other in range(size) for _ in range((other + rank) % 3)]
    again, received_again = hvd.synchronize(hvd.alltoall_async(given, splits, name="dealt"))
    assert torch.equal(again, rows)
    assert torch.equal(received_again, received)
    assert received.dtype is torch.int32


def check_the_gradient_of_all_to_all():
    """It goes back the way the rows came."""
    size, rank = hvd.size(), hvd.rank()
    given = torch.ones(size, dtype=torch.float64, requires_grad=True)
    (hvd.alltoall(given) * (rank + 1)).sum().backward()
    assert given.grad.tolist() == [float(other + 1) for other in range(size)]


def check_what_all_to_all_refuses():
    """Splits that do not fit, at once, on the rank that gives them."""
    size = hvd.size()
    ones = torch.ones(size)
    too_many = torch.full((size,), 2, dtype=torch.int32)
    cases = {
        "Sum of splits entries is greater than the first dimension of tensor.": (ones, too_many),
        "alltoall expects splits to contain 32-bit integer elements.": (ones, too_many.double()),
        "splits not provided, but first dimension of tensor is not an even multiple of the number of workers.": (
            torch.ones(size + 1),
            None,
        ),
        "Number of entries in splits does not equal number of workers.": (
            ones,
            torch.ones(size + 1, dtype=torch.int32),
        ),
        "alltoall expects a 1D splits tensor": (ones, torch.ones(1, size, dtype=torch.int32)),
    }
    for text, (tensor, splits) in cases.items():
        assert text == raised(ValueError, lambda tensor=tensor, splits=splits: hvd.alltoall(tensor, splits))


def check_reducing_and_scattering():
    """Each rank keeps its rows of the whole; the first ranks get one more if they do not come out even."""
    size, rank = hvd.size(), hvd.rank()
    for rows in (size * 2, size + 1, 3):
        given = torch.arange(rows * 2, dtype=torch.float64).reshape(rows, 2) * (rank + 1)
        total = torch.arange(rows * 2, dtype=torch.float64).reshape(rows, 2) * sum(range(1, size + 1))
        each, more = divmod(rows, size)
        start = rank * each + min(rank, more)
        expected = total[start : start + each + (rank < more)]
        torch.testing.assert_close(hvd.reducescatter(given, op=hvd.Sum), expected, rtol=1e-14, atol=0)
        torch.testing.assert_close(hvd.reducescatter(given), expected / size, rtol=1e-14, atol=0)
        found = hvd.synchronize(hvd.reducescatter_async(given, op=hvd.Sum, name=f"scattered.{rows}"))
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    first, second = hvd.grouped_reducescatter([torch.ones(size), torch.ones(size, 2)], op=hvd.Sum)
    assert first.tolist() == [float(size)]
    assert second.tolist() == [[float(size)] * 2]
    raised((ValueError, hvd.HorovodInternalError), lambda: hvd.reducescatter(torch.tensor(1.0)))
    raised((ValueError, hvd.HorovodInternalError), lambda: hvd.reducescatter(torch.ones(size), op=hvd.Min))


def check_the_gradient_of_reducing_and_scattering():
    """It is gathered from all, times the size for a sum."""
    size, rank = hvd.size(), hvd.rank()
    for op in (hvd.Sum, hvd.Average):
        given = torch.ones(size * 2, dtype=torch.float64, requires_grad=True)
        (hvd.reducescatter(given, op=op) * (rank + 1)).sum().backward()
        times = size if op == hvd.Sum else 1
        expected = [float(other + 1) * times for other in range(size) for _ in range(2)]
        torch.testing.assert_close(given.grad, torch.tensor(expected, dtype=torch.float64))
