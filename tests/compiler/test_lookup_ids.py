"""The part of a program that computes ids: it has what they need, and nothing that draws, sends or changes anything."""

from operator import getitem

import pytest
import torch
from torch import fx

from rankless.compiler.local_program import IdsProgram, find_lookup_ids, generate_function
from rankless.extensions.servers.table_operators import run_table_rows

aten = torch.ops.aten


class Program:
    """A rank's program with a weight, ids and lookups."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.weight, self.ids = self.graph.placeholder("weight"), self.graph.placeholder("ids")

    def call(self, target, *arguments, **keywords):
        return self.graph.call_function(target, arguments, keywords)

    def look_up(self, ids, source=0):
        return self.call(run_table_rows, self.weight, ids, source, 4)

    def find(self):
        self.graph.output((self.weight,))
        return find_lookup_ids(self.graph)

    def compute(self, ids):
        graph, sources = self.find()
        program = IdsProgram(generate_function(graph), sources)
        return [(source, values.tolist()) for source, values in program([torch.zeros(1, 2), ids])]


@pytest.fixture
def program():
    return Program()


def test_a_program_without_lookups_has_no_such_part(program):
    program.call(aten.add.Tensor, program.ids, 1)
    assert program.find() is None


def test_ids_are_computed_without_what_they_do_not_need(program):
    shifted = program.call(aten.add.Tensor, program.ids, 5)
    rows = program.look_up(shifted, source=7)
    program.call(aten.mm.default, rows, rows)  # would fail
    program.look_up(program.ids, source=3)
    assert program.compute(torch.tensor([1, 2])) == [(7, [6, 7]), (3, [1, 2])]


def test_results_with_several_values_are_taken_apart(program):
    parts = program.call(aten.split.Tensor, program.ids, 2)
    program.look_up(program.call(getitem, parts, 1))
    assert program.compute(torch.tensor([1, 2, 3])) == [(0, [3])]


def test_a_sum_in_place_leaves_its_term(program):
    doubled = program.call(aten.mul.Tensor, program.ids, 2)
    program.look_up(doubled, source=1)
    program.look_up(program.call(aten.add_.Tensor, doubled, program.ids), source=2)
    ids = torch.tensor([1, 2])
    assert program.compute(ids) == [(1, [2, 4]), (2, [3, 6])]
    assert ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda p: p.call(aten.randint_like.default, p.ids, 9), id="random numbers"),
        pytest.param(lambda p: p.call(aten.copy_.default, p.ids, p.ids), id="a change of an input"),
        pytest.param(lambda p: p.call(aten.argmax.default, p.look_up(p.ids, source=4)), id="rows"),
        pytest.param(lambda p: p.call(lambda ids: ids, p.ids), id="a function of Rankless"),
        pytest.param(lambda p: p.call(torch.ops.servers.table_gradients.default, p.ids, p.ids, 0), id="its operator"),
    ],
)
def test_ids_that_need_more_than_the_inputs_are_left_out(program, make):
    program.look_up(make(program), source=5)
    program.look_up(program.ids, source=6)
    _, sources = program.find()
    assert 5 not in sources
    assert 6 in sources


def test_ids_of_a_collective_are_left_out(program):
    gathered = program.call(aten.clone.default, program.ids)
    gathered.meta["collective"] = "all_gather"
    program.look_up(program.call(aten.add.Tensor, gathered, 1))
    assert program.find() is None
