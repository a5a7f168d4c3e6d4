"""The memory that a program takes: what operators allocate, each memory once, until it is freed."""

import torch

from rankless.jobs.memory_meter import PeakMemoryMode, count_tensor_bytes

KIB = 1024


def tensor(kibibytes: int) -> torch.Tensor:
    return torch.ones(kibibytes * KIB // 4)


def test_results_count_once_and_views_and_existing_memory_do_not():
    x = tensor(8)
    with PeakMemoryMode([x]) as meter:
        first = x.exp()
        second = first.view(2, -1).t()[1:]
        x.add_(1)
        first.mul_(second.sum())
    assert meter.peak_bytes == 8 * KIB + 4


def test_freed_memory_no_longer_counts():
    x = tensor(8)
    with PeakMemoryMode([x]) as meter:
        value = x
        for _ in range(5):
            value = value.exp()
    assert meter.peak_bytes == 2 * 8 * KIB


def test_all_results_of_an_operator_count():
    x = tensor(8).view(32, -1)
    with PeakMemoryMode([x]) as meter:
        torch.topk(x, 4)
    assert meter.peak_bytes == 32 * 4 * (4 + 8)


def test_bytes_of_tensors_count_each_tensor_once():
    x, sparse = tensor(2), torch.eye(3).to_sparse()
    assert count_tensor_bytes([x, x, None, 3, sparse, tensor(1).double()]) == 2 * KIB + 2 * KIB


def test_a_copy_counts_that_an_operator_makes_only_where_it_needs_one():
    x = tensor(8).view(32, -1)
    with PeakMemoryMode([x]) as meter, torch._C._AutoDispatchBelowAutograd():  # as programs run
        assert x.contiguous() is x
        x.t().contiguous()
    assert meter.peak_bytes == 8 * KIB
