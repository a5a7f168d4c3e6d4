"""SyncBatchNorm against one process's BatchNorm over the whole batch, also on the CPU."""

import horovod.torch as hvd
import torch
from torch import nn


def rows(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2 + rank, 3, 4, generator=generator, dtype=torch.float64)


def check_the_whole_batchs_numbers():
    """Outputs, running statistics and gradients are those of the whole batch, also if ranks have more or fewer rows."""
    plain, synced = nn.BatchNorm1d(3).double(), hvd.SyncBatchNorm(3).double()
    whole = torch.cat([rows(rank) for rank in range(hvd.size())]).requires_grad_()
    own = rows(hvd.rank()).requires_grad_()
    weights = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    expected = plain(whole)
    (expected.square() * weights).sum().backward()
    found = synced(own)
    (found.square() * weights).sum().backward()
    start = sum(2 + rank for rank in range(hvd.rank()))
    part = slice(start, start + 2 + hvd.rank())
    torch.testing.assert_close(found, expected[part], rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(own.grad, whole.grad[part], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(synced.running_mean, plain.running_mean, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(synced.running_var, plain.running_var, rtol=1e-11, atol=1e-12)
    total = hvd.allreduce(synced.weight.grad, op=hvd.Sum)
    torch.testing.assert_close(total, plain.weight.grad, rtol=1e-9, atol=1e-10)


def check_evaluation():
    """In evaluation it is a plain BatchNorm."""
    synced = hvd.SyncBatchNorm(3).double().eval()
    plain = nn.BatchNorm1d(3).double().eval()
    given = rows(hvd.rank())
    torch.testing.assert_close(synced(given), plain(given))
