"""Gradients of the operations: each backward against sums of all ranks' gradients."""

import torch
from support.horovod_ranks import on_ranks


def tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def through_allreduce(hvd):
    ranks = range(hvd.size())
    weights = [tensor(10 + rank, 3, 2) for rank in ranks]
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, hvd.size())):
        own = tensor(hvd.rank(), 3, 2).requires_grad_()
        (hvd.allreduce(own, op=op, prescale_factor=0.5) * weights[hvd.rank()]).sum().backward()
        torch.testing.assert_close(own.grad, sum(weights) * 0.5 / divisor)
    own = tensor(hvd.rank(), 3, 2).requires_grad_()
    first, second = hvd.grouped_allreduce([own, own * 2], op=hvd.Sum)
    (first * weights[hvd.rank()] + second).sum().backward()
    torch.testing.assert_close(own.grad, sum(weights) + 2 * hvd.size())


def test_backward_of_allreduce_reduces_by_the_same_op():
    on_ranks(2, through_allreduce)


def through_allgather(hvd):
    counts = [rank + 1 for rank in range(hvd.size())]
    weights = [tensor(10 + rank, sum(counts), 2) for rank in range(hvd.size())]
    start, rows = sum(counts[: hvd.rank()]), counts[hvd.rank()]
    expected = (sum(weights) / hvd.size())[start : start + rows]
    own = tensor(hvd.rank(), rows, 2).requires_grad_()
    (hvd.allgather(own) * weights[hvd.rank()]).sum().backward()
    torch.testing.assert_close(own.grad, expected)
    own = tensor(hvd.rank(), rows, 2).requires_grad_()
    one, other = hvd.grouped_allgather([own, own[:1] * 3])
    ((one * weights[hvd.rank()]).sum() + other.sum()).backward()
    expected = expected.clone()
    expected[0] += 3
    torch.testing.assert_close(own.grad, expected)


def test_backward_of_allgather_averages_and_takes_its_own_rows():
    on_ranks(3, through_allgather)


def through_broadcast(hvd):
    weights = [tensor(10 + rank, 4) for rank in range(hvd.size())]
    own = tensor(hvd.rank(), 4).requires_grad_()
    (hvd.broadcast(own, 1) * weights[hvd.rank()]).sum().backward()
    expected = sum(weights) / hvd.size() if hvd.rank() == 1 else torch.zeros(4, dtype=torch.float64)
    torch.testing.assert_close(own.grad, expected)


def test_backward_of_broadcast_averages_on_the_root_and_is_zero_elsewhere():
    on_ranks(2, through_broadcast)


def through_alltoall(hvd):
    n, rank = hvd.size(), hvd.rank()
    counts = [[1 + (sender + receiver) % 2 for receiver in range(n)] for sender in range(n)]
    whole = [tensor(sender, sum(counts[sender]) + 1, 2) for sender in range(n)]
    weights = [tensor(10 + r, sum(counts[s][r] for s in range(n)), 2) for r in range(n)]
    own = whole[rank].clone().requires_grad_()
    output, _ = hvd.alltoall(own, splits=counts[rank])
    (output * weights[rank]).sum().backward()
    expected = []
    for receiver in range(n):
        start = sum(counts[sender][receiver] for sender in range(rank))
        expected.append(weights[receiver][start : start + counts[rank][receiver]])
    expected.append(torch.zeros(1, 2, dtype=torch.float64))
    torch.testing.assert_close(own.grad, torch.cat(expected))
    even = tensor(rank, 2 * n).requires_grad_()
    (hvd.alltoall(even) * rank).sum().backward()
    assert even.grad.tolist() == [float(receiver) for receiver in range(n) for _ in range(2)]


def test_backward_of_alltoall_sends_gradients_back():
    on_ranks(3, through_alltoall)


def through_reducescatter(hvd):
    n, rank = hvd.size(), hvd.rank()
    rows = [2, 1] if n == 2 else [1] * n
    weights = [tensor(10 + other, rows[other], 2) for other in range(n)]
    for op, factor in ((hvd.Sum, n), (hvd.Average, 1)):
        own = tensor(rank, 3, 2).requires_grad_()
        (hvd.reducescatter(own, op=op) * weights[rank]).sum().backward()
        torch.testing.assert_close(own.grad, torch.cat(weights) * factor)
        own = tensor(rank, 3, 2).requires_grad_()
        one, other = hvd.grouped_reducescatter([own, own], op=op)
        ((one + other) * weights[rank]).sum().backward()
        torch.testing.assert_close(own.grad, torch.cat(weights) * factor * 2)


def test_backward_of_reducescatter_gathers():
    on_ranks(2, through_reducescatter)


def through_compression(hvd):
    own = torch.ones(3, requires_grad=True)
    hvd.allreduce(own, op=hvd.Sum, compression=hvd.Compression.fp16).sum().backward()
    second = torch.ones(2, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(hvd.allreduce(second**3, op=hvd.Sum).sum(), second, create_graph=True)
    slope.sum().backward()
    return own.grad.tolist(), second.grad.tolist()


def test_compression_is_differentiable_twice():
    # d/dx of n·3x² is n·6x, with n ranks in the first backward.
    assert on_ranks(2, through_compression) == [([2.0] * 3, [12.0, 12.0])] * 2
