"""Graph cleanup keeps results in memory of their own."""

import pytest
import torch
from simulated_ranks import run_on_simulated_ranks
from torch import nn

VIEWS_OF_A_PARAMETER = {
    "itself": lambda weight: weight,
    "a row by unbind": lambda weight: weight.unbind(0)[1],
    "a part by split": lambda weight: weight.split(2)[0],
    "windows by unfold": lambda weight: weight.unfold(0, 2, 1),
    "a view of a view": lambda weight: weight.t()[1:].unbind(1)[0],
    "a diagonal": lambda weight: weight.diagonal(),
}


@pytest.mark.parametrize("view", VIEWS_OF_A_PARAMETER.values(), ids=VIEWS_OF_A_PARAMETER.keys())
def test_a_result_that_is_a_view_of_a_parameter_does_not_change_with_it(view):
    model = nn.Linear(4, 4)
    before = view(model.weight).detach().clone()
    found = run_on_simulated_ranks(
        lambda x: (model(x), view(model.weight)), {"model": model}, [torch.randn(6, 4)], 2, trains=False
    )
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(found.results[1], before)


def test_a_fresh_result_is_not_copied_once_more():
    model = nn.Linear(4, 4)
    found = run_on_simulated_ranks(lambda x: model(x).relu(), {"model": model}, [torch.randn(6, 4)], 2, trains=False)
    operators = [str(node.target) for node in found.sharded.logical.graph.nodes if node.op == "call_function"]
    assert "aten.clone.default" not in operators


def test_dropout_with_probability_zero_copies_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.0), nn.Linear(4, 4))
    found = run_on_simulated_ranks(lambda x: model(x).sum(), {"model": model}, [torch.randn(6, 4)], 2, trains=True)
    operators = [str(node.target) for node in found.sharded.logical.graph.nodes if node.op == "call_function"]
    assert "aten.clone.default" not in operators


COPIES = {
    "a view of it is returned": lambda h: (h.clone().t(), h),
    "it and its copy are returned": lambda h: (h.clone(), h),
    "the copy is changed": lambda h: (h.clone().add_(1), h),
    "the copied value is changed": lambda h: (h.clone() * 2, h.mul_(3)),
    "a view of the copy is changed": lambda h: (h.clone().view(-1).zero_(), h),
    "in another layout": lambda h: (h.t().clone(memory_format=torch.contiguous_format).view(-1) * 2, h),
    "of a repeated row": lambda h: (h[:1].expand(4, 4).clone().view(-1) * 2, h),
    "of copies": lambda h: (h.clone().clone().clone() + 1, h),
}


@pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES.keys())
def test_results_behind_copies_are_right_and_share_no_memory(copies):
    model = nn.Linear(4, 4)
    x = torch.randn(6, 4)
    found = run_on_simulated_ranks(lambda x: copies(model(x).relu()), {"model": model}, [x], 1, trains=False)
    for one, other in zip(found.results, copies(model(x).relu()), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    before = found.results[1].clone()
    found.results[0].add_(1)
    assert torch.equal(found.results[1], before)
