"""Every operator that has a rule, forward and backward, on uneven shards against one device in float64."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from image_operator_cases import IMAGES, SPLIT_IMAGES
from index_operator_cases import INDEXING, SPLIT_INDEXING
from layer_operator_cases import (
    ATTENTION,
    LOSSES,
    MATRICES,
    NORMALIZATIONS,
    SPLIT_MATRICES,
    SPLIT_NORMALIZATIONS,
)
from linear_algebra_cases import SPLIT_FOURIER, SPLIT_LINEAR_ALGEBRA
from operator_cases import Case, check_function
from reduction_operator_cases import RANDOM, REDUCTIONS, SPLIT_REDUCTIONS
from simulated_ranks import Outcome
from view_operator_cases import POINTWISE, SPLIT_POINTWISE, SPLIT_VIEWS, VIEWS

from rankless.compiler.rule_table import SHARDING_RULES
from rankless.parallel.tensor_placement import Replicate
from rankless.user_code import display_name

aten = torch.ops.aten

EARLIER = VIEWS | REDUCTIONS | MATRICES | NORMALIZATIONS | LOSSES | ATTENTION | IMAGES | INDEXING | RANDOM | POINTWISE
SPLIT = SPLIT_VIEWS | SPLIT_REDUCTIONS | SPLIT_MATRICES | SPLIT_NORMALIZATIONS | SPLIT_IMAGES | SPLIT_INDEXING
CASES = EARLIER | SPLIT | SPLIT_POINTWISE | SPLIT_LINEAR_ALGEBRA | SPLIT_FOURIER
NEEDS_ROWS = {name for name, case in CASES.items() if case.rows != 7}


@functools.cache
def check_case(name: str, ranks: int) -> Outcome:
    """Return the outcome of a case, after asserting that it equals one device's; each case runs once."""
    return check_function(CASES[name], ranks)


@pytest.mark.ci_sample(10)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [3, 4, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (2, 7))])
def test_an_operator_on_shards_has_the_values_and_gradients_of_one_device(name, ranks):
    check_case(name, ranks)


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.splits])
def test_an_operator_that_can_be_split_is_split(name):
    outcome = check_case(name, 3)
    assert [node.target for node in outcome.sharded.nodes_without_rule] == []
    moves = [record for record in outcome.local.collectives if record.gathered or record.kind == "all_to_all"]
    assert [(record.reason, record.line) for record in moves] == []


@pytest.mark.ci_sample(5)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.splits and name not in NEEDS_ROWS])
def test_an_operator_is_exact_where_a_rank_has_no_rows(name):
    check_function(CASES[name], 3, rows=2)


def is_sharded(outcome: Outcome, node: Any) -> bool:
    """Return whether an operator works on shards, or is lowered in a special way for them."""
    strategy = outcome.sharded.axes[0].strategies[node]
    placements = (*strategy.inputs, *strategy.outputs)
    return strategy.lower is not None or any(not isinstance(item, Replicate) for item in placements)


def test_an_empty_cache_does_not_gather_what_is_joined_to_it():
    outcome = check_case("cat with an empty cache", 3)
    assert [record.reason for record in outcome.local.collectives if record.gathered] == []


CUDA_ONLY = {
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}
TABLES = {
    torch.ops.rankless.weight_rows.default,
    torch.ops.rankless.weight_gradients.default,
    torch.ops.rankless.bag_numbers.default,
}
"""They need a table: tests/jobs/test_table_runs.py has them."""
DRAWN_REPLICATED = {
    aten.rand.default,
    aten.randn.default,
    aten.randint.default,
    aten.randint.low,
    aten.randperm.default,
    aten.normal.float_float,
    aten.bernoulli.default,
    aten.multinomial.default,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
    aten.poisson.default,
}


@pytest.mark.exhaustive
def test_some_case_covers_every_rule_on_shards():
    sharded_targets, replicated_targets = set(), set()
    for name in CASES:
        outcome = check_case(name, 3)
        for node in outcome.sharded.operators:
            (sharded_targets if is_sharded(outcome, node) else replicated_targets).add(node.target)
    assert {
        operator for operator in SHARDING_RULES if operator not in sharded_targets
    } == CUDA_ONLY | DRAWN_REPLICATED | TABLES
    assert replicated_targets >= DRAWN_REPLICATED


WITHOUT_RULE = {
    "distances of all pairs": (lambda x: F.pdist(x), "aten._pdist_forward.default"),
    "median of all": (lambda x: x.median() * x, "aten.median.default"),
    "blocks": (lambda x: torch.block_diag(x, x).square(), "aten.block_diag.default"),
}


@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_an_operator_without_a_rule_is_exact_and_reported_with_its_line(name):
    function, operator = WITHOUT_RULE[name]
    outcome = check_function(Case(function), 3)
    reported = {str(node.target): node.meta["line"] for node in outcome.sharded.nodes_without_rule}
    assert reported[operator].startswith(f"{display_name(__file__)}:")
