"""What a loss is divided by is the same on every rank, whatever order its sets have there."""

from types import SimpleNamespace

import pytest
from torch import fx

from rankless.compiler.analysis.batch_dim_kinds import BatchSum, Normalizer
from rankless.compiler.analysis.loss_normalizers import find_normalizers


@pytest.mark.parametrize("reverse", [False, True])
def test_of_counts_that_are_computed_alike_the_first_of_the_program_is_taken(reverse):
    graph = fx.Graph()
    first, second, third, objective = (graph.placeholder(name) for name in ("first", "second", "third", "objective"))
    given = [
        Normalizer("a count", second, is_literal=False),
        Normalizer("a count", third, is_literal=False),
        Normalizer("a number of rows", first, is_literal=True),
        Normalizer("a number of rows", third, is_literal=True),
    ]
    # A tuple in place of the set: the order in which this rank happens to meet them.
    found = SimpleNamespace(kinds={objective: BatchSum(tuple(given[::-1] if reverse else given))})
    taken = find_normalizers(objective, found, "train.py:1")
    assert [(divisor.node, divisor.is_literal) for divisor in taken] == [(first, True), (second, False), (third, True)]
