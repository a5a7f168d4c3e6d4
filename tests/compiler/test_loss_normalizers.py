"""What a loss is divided by is the same on every rank, whatever order its sets have there."""

from types import SimpleNamespace

import pytest
from torch import fx

from rankless.compiler.analysis.batch_dim_kinds import Divisor, Sum
from rankless.compiler.analysis.loss_normalizers import divisors_of


@pytest.mark.parametrize("reverse", [False, True])
def test_of_counts_that_are_computed_alike_the_first_of_the_program_is_taken(reverse):
    graph = fx.Graph()
    first, second, third, objective = (graph.placeholder(name) for name in ("first", "second", "third", "objective"))
    given = [
        Divisor("a count", second, literal=False),
        Divisor("a count", third, literal=False),
        Divisor("a number of rows", first, literal=True),
        Divisor("a number of rows", third, literal=True),
    ]
    # A tuple in place of the set: the order in which this rank happens to meet them.
    found = SimpleNamespace(kinds={objective: Sum(tuple(given[::-1] if reverse else given))})
    taken = divisors_of(objective, found, "train.py:1")
    assert [(divisor.node, divisor.literal) for divisor in taken] == [(first, True), (second, False), (third, True)]
