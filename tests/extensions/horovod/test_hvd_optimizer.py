"""DistributedOptimizer against one process that has all ranks' batches."""

import copy

import pytest
import torch
from support.horovod_ranks import error_of, on_ranks
from torch import nn

from rankless.extensions.horovod.common import util

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def wide_model() -> nn.Sequential:
    """Of several MiB: its gradients go in several batches, by the planes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 500), nn.Tanh(), nn.Linear(500, 600), nn.Tanh(), nn.Linear(600, 3)).double()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def one_process(make, build, size, steps, factor=1.0):
    """The model after steps on the mean of the ranks' losses, times a factor."""
    plain = build()
    optimizer = OPTIMIZERS[make](plain.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        (sum(plain(batch(rank, step)).pow(2).mean() for rank in range(size)) / size * factor).backward()
        optimizer.step()
    return plain


def assert_same(module, expected):
    for one, other in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def trained(hvd, make, build, switches, factor):
    own = build()
    if "groups" in switches and switches["groups"] == "lists":
        parameters = list(own.parameters())
        switches = {"groups": [parameters[:2], parameters[3:5]]}
    optimizer = OPTIMIZERS[make](own.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=own.named_parameters(), **switches)
    for step in range(3):
        optimizer.zero_grad()
        own(batch(hvd.rank(), step)).pow(2).mean().backward()
        optimizer.step()
    assert_same(own, one_process(make, build, hvd.size(), 3, factor))


@pytest.mark.parametrize("build", [model, wide_model])
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.ci_sample(3)
def test_it_trains_as_one_process_with_all_batches(size, make, build):
    on_ranks(size, trained, make, build, {}, 1.0)


@pytest.mark.parametrize(
    "switches",
    [{"gradient_predivide_factor": 4.0}, {"groups": 2}, {"groups": "lists"}, {"groups": 20}],
    ids=str,
)
def test_switches_for_performance_do_not_change_the_result(switches):
    on_ranks(2, trained, "sgd", wide_model, switches, 1.0)


def test_op_sum_adds_the_gradients_of_all_ranks():
    on_ranks(2, summed)


def summed(hvd):
    trained(hvd, "sgd", model, {"op": hvd.Sum}, 2.0)


def accumulated(hvd, passes):
    own = model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](own.parameters()), own.named_parameters(), backward_passes_per_step=passes
    )
    assert optimizer.backward_passes_per_step == passes
    for step in range(2):
        optimizer.zero_grad()
        for _ in range(passes):
            own(batch(hvd.rank(), step)).pow(2).mean().backward()
        optimizer.step()
    # Gradients are summed over the passes, and not divided by their number.
    assert_same(own, one_process("sgd", model, hvd.size(), 2, float(passes)))
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    own(batch(hvd.rank(), 0)).mean().backward()
    again = error_of(lambda: own(batch(hvd.rank(), 0)).mean().backward())
    optimizer.synchronize()
    return again


@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_summed_over_the_passes_of_a_step(passes):
    text = (
        "Gradients were computed more than backward_passes_per_step times before call to step(). "
        "Increase backward_passes_per_step to accumulate gradients locally."
    )
    assert on_ranks(2, accumulated, passes) == [("AssertionError", text)] * 2


def fewer_passes(hvd):
    own = model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](own.parameters()), own.named_parameters(), backward_passes_per_step=3
    )
    own(batch(hvd.rank(), 0)).pow(2).mean().backward()
    optimizer.step()
    assert_same(own, one_process("sgd", model, hvd.size(), 1))


def test_a_step_before_all_passes_reduces_the_existing_gradients():
    on_ranks(2, fewer_passes)


def skipping(hvd, switches):
    torch.manual_seed(0)
    own = nn.ModuleList([nn.Linear(2, 2, bias=False).double() for _ in range(3)])
    reference = copy.deepcopy(own)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(own.parameters(), lr=0.1), own.named_parameters(), **switches)
    rows = torch.eye(2, dtype=torch.float64)
    for step in range(2):
        optimizer.zero_grad()
        own[(hvd.rank() + step) % 2](rows).sum().backward()
        optimizer.step()
    assert own[2].weight.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        plain.zero_grad()
        (sum(reference[(rank + step) % 2](rows).sum() for rank in range(hvd.size())) / hvd.size()).backward()
        plain.step()
    assert_same(own, reference)


@pytest.mark.parametrize("switches", [{}, {"groups": 1}, {"groups": 2}], ids=str)
def test_unused_parameters_of_a_rank_take_part_with_zeros(switches):
    on_ranks(2, skipping, switches)


def compressed(hvd):
    own = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(own.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(own.parameters(), lr=1.0), own.named_parameters(), compression=hvd.Compression.fp16
    )
    rows = [torch.tensor([[1.0, 1 / 3, 4097.0]]), torch.tensor([[3.0, 1 / 7, 2.0]])]
    own(rows[hvd.rank()]).sum().backward()
    optimizer.step()
    expected = -sum(row.half() for row in rows).div(2).float()
    torch.testing.assert_close(own.weight.data, expected)
    return own.weight.grad.dtype


def test_compressed_gradients_arrive_in_their_own_dtype():
    assert on_ranks(2, compressed) == [torch.float32] * 2


class Doubling:
    """A compressor as scripts write them."""

    @staticmethod
    def compress(tensor):
        return tensor.repeat(2), tensor.numel()

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.view(-1)[:ctx].clone() * 10


def compressed_by_the_script(hvd):
    own = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own], lr=1.0), compression=Doubling)
    (own * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    return own.tolist()


def test_a_script_can_define_its_own_compressor():
    assert on_ranks(2, compressed_by_the_script) == [[-15.0] * 3] * 2


def sparse(hvd, as_dense):
    torch.manual_seed(0)
    table = nn.Embedding(10, 3, sparse=True).double()
    reference = copy.deepcopy(table)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.5), table.named_parameters(), sparse_as_dense=as_dense
    )
    words = [[torch.tensor([1, 2, 2]), torch.tensor([7])], [torch.tensor([2, 9]), torch.tensor([0, 1])]]
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        table(words[hvd.rank()][step]).pow(2).sum().backward()
        optimizer.step()
        assert table.weight.grad.is_sparse
        plain.zero_grad()
        (sum(reference(words[rank][step]).pow(2).sum() for rank in range(2)) / 2).backward()
        plain.step()
    torch.testing.assert_close(table.weight, reference.weight)
    # A table that one rank has not looked into.
    optimizer.zero_grad()
    if hvd.rank() == 0:
        table(words[0][0]).sum().backward()
    optimizer.step()
    plain.zero_grad()
    (reference(words[0][0]).sum() / 2).backward()
    plain.step()
    torch.testing.assert_close(table.weight, reference.weight)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_are_reduced_and_stay_sparse(as_dense):
    on_ranks(2, sparse, as_dense)


def laid_out_by_channels(hvd):
    torch.manual_seed(0)
    own = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
    reference = copy.deepcopy(own)
    images = [torch.randn(2, 3, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(own.parameters(), lr=0.1), own.named_parameters())
    own(images[hvd.rank()]).pow(2).sum().backward()
    optimizer.step()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    (sum(reference(each).pow(2).sum() for each in images) / 2).backward()
    plain.step()
    assert_same(own, reference)


def test_gradients_of_any_layout_are_reduced():
    on_ranks(2, laid_out_by_channels)


def in_a_process_set(hvd):
    members = hvd.add_process_set([0, 2])
    own = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own], lr=1.0), process_set=members)
    (own * (hvd.rank() + 1)).sum().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    # Who leaves ends it for all.
    hvd.barrier()
    return own.tolist()


def test_gradients_are_reduced_within_a_process_set():
    assert on_ranks(3, with_dynamic_sets) == [[-2.0, -2.0], [-2.0, -2.0], [-2.0, -2.0]]


def with_dynamic_sets(hvd):
    hvd.shutdown()
    with util.env(HOROVOD_DYNAMIC_PROCESS_SETS="1"):
        hvd.init()
    return in_a_process_set(hvd)


def by_adasum(hvd):
    torch.manual_seed(0)
    own = nn.Linear(3, 2).double()
    references = [copy.deepcopy(own) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(own.parameters(), lr=0.1), own.named_parameters(), op=hvd.Adasum
    )
    rows = [torch.tensor([[1.0, 2.0, 3.0]]).double(), torch.tensor([[-1.0, 0.5, 2.0]]).double()]
    own(rows[hvd.rank()]).pow(2).sum().backward()
    optimizer.step()
    starts = [parameter.detach().clone() for parameter in references[0].parameters()]
    for reference, row in zip(references, rows, strict=True):
        reference(row).pow(2).sum().backward()
        torch.optim.Adam(reference.parameters(), lr=0.1).step()
    for result, start, one, other in zip(
        own.parameters(), starts, references[0].parameters(), references[1].parameters(), strict=True
    ):
        a, b = one.detach() - start, other.detach() - start
        shared = (a * b).sum()
        delta = a * (1 - shared / (2 * (a * a).sum())) + b * (1 - shared / (2 * (b * b).sum()))
        torch.testing.assert_close(result, start + delta)
    with pytest.raises(AssertionError, match="Skipping synchronization is not supported when using Adasum optimizer"):
        optimizer.skip_synchronize().__enter__()


def test_adasum_combines_what_each_ranks_step_changes():
    on_ranks(2, by_adasum)
