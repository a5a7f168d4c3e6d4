"""SyncBatchNorm on the CPU, against torch's BatchNorm over all ranks' batches in one process."""

import pytest
import torch
from support.horovod_ranks import error_of, on_ranks
from torch import nn

ROWS = [3, 1, 0, 4]


def batch(rank: int, tail: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS[rank], 5, *tail, dtype=torch.float64, generator=generator) * (rank + 1) + 100 * rank


def oracle(kind, tail, size, switches):
    """Outputs, input gradients and the module, of two steps over the whole batch."""
    torch.manual_seed(0)
    plain = kind(5, **switches).double()
    if plain.affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    whole = torch.cat([batch(rank, tail) for rank in range(size)]).requires_grad_()
    for _ in range(2):
        output = plain(whole)
        output.pow(3).sum().backward()
    return plain, whole, output


def synchronized(hvd, tail, switches):
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(tail)]
    plain, whole, expected = oracle(kind, tail, hvd.size(), switches)
    module = hvd.SyncBatchNorm(5, **switches).double()
    if module.affine:
        torch.manual_seed(0)
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
    own = batch(hvd.rank(), tail).requires_grad_()
    for _ in range(2):
        output = module(own)
        output.pow(3).sum().backward()
    start, rows = sum(ROWS[: hvd.rank()]), ROWS[hvd.rank()]
    torch.testing.assert_close(output, expected[start : start + rows])
    torch.testing.assert_close(own.grad, whole.grad[start : start + rows])
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value)
    if module.affine:
        for name in ("weight", "bias"):
            total = hvd.allreduce(getattr(module, name).grad, op=hvd.Sum)
            torch.testing.assert_close(total, getattr(plain, name).grad)
    module.eval()
    plain.eval()
    if module.track_running_stats:
        torch.testing.assert_close(module(own), plain(own))


@pytest.mark.parametrize("tail", [(), (6,), (2, 3), (2, 1, 2)])
def test_it_is_batch_norm_over_all_ranks_batches(tail):
    on_ranks(2, synchronized, tail, {})


@pytest.mark.parametrize(
    "switches",
    [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.1, "momentum": 0.5}],
    ids=str,
)
def test_it_has_the_switches_of_batch_norm(switches):
    on_ranks(2, synchronized, (3,), switches)


@pytest.mark.slow
def test_batches_may_differ_and_one_may_be_empty():
    on_ranks(4, synchronized, (2, 2), {})


def half(hvd):
    module = hvd.SyncBatchNorm(5)
    own = batch(hvd.rank(), (4,)).to(torch.bfloat16).requires_grad_()
    output = module(own)
    output.float().pow(2).sum().backward()
    return output.dtype, own.grad.dtype, module.running_mean.dtype, bool(output.isfinite().all())


def test_half_precision_is_normalized_in_float32():
    assert on_ranks(2, half) == [(torch.bfloat16, torch.bfloat16, torch.float32, True)] * 2


def too_few(hvd):
    own = torch.ones(1 - hvd.rank(), 5)
    return error_of(lambda: hvd.SyncBatchNorm(5)(own)), error_of(lambda: hvd.SyncBatchNorm(5)(torch.ones(5)))


def test_one_value_per_channel_is_rejected():
    first, _ = on_ranks(2, too_few)
    text = "Expected more than 1 value per channel when training, got input size torch.Size([1, 5])"
    assert first == (("ValueError", text), ("ValueError", "expected at least 2D input (got 1D input)"))
