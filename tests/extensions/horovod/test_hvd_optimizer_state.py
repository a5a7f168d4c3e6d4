"""broadcast_parameters and broadcast_optimizer_state copy the root's values, and change nothing else."""

import copy

import pytest
import torch
from support.horovod_ranks import error_of, on_ranks
from torch import nn

KINDS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.9)),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01, etas=(0.4, 1.1)),
}


def prepared(hvd, kind):
    """A model that differs from rank to rank, and an optimizer that has stepped on rank 1 alone."""
    torch.manual_seed(hvd.rank())
    own = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = KINDS[kind](own.parameters())
    if hvd.rank() == 1:
        own(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.125
    return own, optimizer


def restored(hvd, kind, wraps_first):
    own, plain = prepared(hvd, kind)
    optimizer = hvd.DistributedOptimizer(plain, own.named_parameters()) if wraps_first else plain
    groups = optimizer.param_groups
    hvd.broadcast_parameters(own.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert optimizer.param_groups is groups
    assert optimizer.state is plain.state
    for content in (own.state_dict(), optimizer.state_dict()):
        for other in hvd.allgather_object(content):
            torch.testing.assert_close(content, other, rtol=0, atol=0)
    assert len(optimizer.state) == 6
    assert optimizer.param_groups[0]["lr"] == 0.125
    if not wraps_first:
        optimizer = hvd.DistributedOptimizer(plain, own.named_parameters())
    torch.manual_seed(hvd.rank())
    own(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    for other in hvd.allgather_object(dict(own.named_parameters())):
        torch.testing.assert_close(dict(own.named_parameters()), other, rtol=0, atol=0)


@pytest.mark.parametrize("wraps_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_continue_from_the_roots_state(kind, wraps_first):
    on_ranks(2, restored, kind, wraps_first)


def untouched(hvd):
    own = nn.Linear(3, 2)
    before = copy.deepcopy(own.state_dict())
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1 * (hvd.rank() + 1), weight_decay=0.5)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.testing.assert_close(own.state_dict(), before, rtol=0, atol=0)
    assert own.weight.grad is not None
    return optimizer.param_groups[0]["lr"], len(optimizer.state), own.weight.grad.abs().sum().item()


def test_an_empty_state_leaves_weights_alone_and_gradients_zero_as_horovod_does():
    assert on_ranks(2, untouched) == [(0.1, 0, 0.0)] * 2


def different(hvd):
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(1 + hvd.rank())]
    return error_of(lambda: hvd.broadcast_optimizer_state(torch.optim.SGD(parameters, lr=0.1), root_rank=0))


def test_an_optimizer_with_other_parameters_is_rejected():
    text = (
        "The root's optimizer has groups of [1] parameters, this rank's of [2]. Build the same optimizer on every rank."
    )
    assert on_ranks(2, different) == [None, ("ValueError", text)]


def in_every_form(hvd):
    def own() -> list[torch.Tensor]:
        return [torch.full((2, 3), float(hvd.rank())).t(), torch.tensor(hvd.rank())]

    results = []
    for form in (
        lambda tensors: {"b": tensors[0], "a": tensors[1]},
        lambda tensors: [("b", tensors[0]), ("a", tensors[1])],
        lambda tensors: iter([("b", tensors[0]), ("a", tensors[1])]),
        lambda tensors: tensors,
    ):
        tensors = own()
        hvd.broadcast_parameters(form(tensors), root_rank=1)
        results.append(bool((tensors[0] == 1).all() and tensors[1] == 1))
    bad = error_of(lambda: hvd.broadcast_parameters({"x": "text"}, root_rank=0))
    return results, bad


def test_parameters_may_be_a_dictionary_pairs_or_a_list():
    text = "invalid params: x is of type <class 'str'>; only tensors can be broadcast"
    assert on_ranks(2, in_every_form) == [([True] * 4, ("ValueError", text))] * 2
