"""The loss normalizers are the same on every rank, whatever the order of its sets."""

from types import SimpleNamespace

import pytest
from torch import fx

from rankless.compiler.accumulation.batch_dim_kinds import BatchSum, Normalizer
from rankless.compiler.accumulation.loss_normalizers import find_normalizers


@pytest.mark.parametrize("reverse", [False, True])
def test_of_counts_with_equal_keys_the_first_in_the_program_is_used(reverse):
    graph = fx.Graph()
    first, second, third, objective = (graph.placeholder(name) for name in ("first", "second", "third", "objective"))
    normalizers = [
        Normalizer("a count", second, is_literal=False),
        Normalizer("a count", third, is_literal=False),
        Normalizer("a number of rows", first, is_literal=True),
        Normalizer("a number of rows", third, is_literal=True),
    ]
    # A tuple replaces the set and fixes the order on this rank.
    analysis = SimpleNamespace(kinds={objective: BatchSum(tuple(normalizers[::-1] if reverse else normalizers))})
    found = find_normalizers(objective, analysis, "train.py:1")
    assert [(divisor.node, divisor.is_literal) for divisor in found] == [(first, True), (second, False), (third, True)]
