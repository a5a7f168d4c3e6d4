"""Sums that overwrite a term: only one that has memory of its own, the layout of the sum, and no later use."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from rankless.compiler.lowering.lower import add_in_place

aten = torch.ops.aten
SQUARE = (3, 3), (3, 1)


class LocalGraphBuilder:
    """Builds a local graph of operators on float32 values."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")

    def call(self, target: Any, *args: Any, layout: Any = SQUARE, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.call_function(target, args)
        value = SimpleNamespace(shape=layout[0], strides=layout[1], dtype=dtype)
        node.meta["logical"] = SimpleNamespace(meta={"val": value})
        return node

    def run(self, *outputs: fx.Node) -> list[Any]:
        """Return the result for ones and the operators that add."""
        self.graph.output(outputs)
        plain = [item.clone() for item in fx.Interpreter(fx.GraphModule({}, self.graph)).run(torch.ones(3, 3))]
        add_in_place(self.graph)
        found = fx.Interpreter(fx.GraphModule({}, self.graph)).run(torch.ones(3, 3))
        assert all(map(torch.equal, found, plain))
        return [node.target for node in self.graph.nodes if node.target in (aten.add.Tensor, aten.add_.Tensor)]


def test_a_sum_overwrites_its_first_term_or_its_second():
    build = LocalGraphBuilder()
    first = build.call(aten.add.Tensor, build.call(aten.exp.default, build.x), build.call(aten.sin.default, build.x))
    second = build.call(aten.add.Tensor, build.x, build.call(aten.cos.default, build.x))
    assert build.run(first, second) == [aten.add_.Tensor] * 2
    assert second.args[1] is build.x


def test_chains_of_sums_use_one_memory():
    build = LocalGraphBuilder()
    total = build.call(aten.add.Tensor, build.call(aten.exp.default, build.x), build.x)
    total = build.call(aten.mul.Tensor, total, build.x)
    total = build.call(aten.add.Tensor, total, build.x)
    assert build.run(total) == [aten.add_.Tensor] * 2


def kept(build: LocalGraphBuilder) -> list[fx.Node]:
    term = build.call(aten.exp.default, build.x)
    return [build.call(aten.add.Tensor, term, build.x), build.call(aten.sin.default, term)]


def returned(build: LocalGraphBuilder) -> list[fx.Node]:
    term = build.call(aten.exp.default, build.x)
    return [build.call(aten.add.Tensor, term, build.x), term]


def seen_by_a_view(build: LocalGraphBuilder) -> list[fx.Node]:
    term = build.call(aten.exp.default, build.x)
    view = build.call(aten.t.default, term, layout=((3, 3), (1, 3)))
    return [build.call(aten.add.Tensor, term, build.x), view]


def added_to_its_view(build: LocalGraphBuilder) -> list[fx.Node]:
    term = build.call(aten.cumsum.default, build.x, 0)
    return [build.call(aten.add.Tensor, term, build.call(aten.t.default, term, layout=((3, 3), (1, 3))))]


def a_view(build: LocalGraphBuilder) -> list[fx.Node]:
    term = build.call(aten.t.default, build.x)
    return [build.call(aten.add.Tensor, term, build.x), build.call(aten.sin.default, build.x)]


def added_to_itself(build: LocalGraphBuilder) -> list[fx.Node]:
    term = build.call(aten.exp.default, build.x)
    return [build.call(aten.add.Tensor, term, term)]


def of_another_shape(build: LocalGraphBuilder) -> list[fx.Node]:
    term = build.call(aten.sum.dim_IntList, build.x, [0], layout=((3,), (1,)))
    return [build.call(aten.add.Tensor, term, build.x)]


def in_another_order(build: LocalGraphBuilder) -> list[fx.Node]:
    term = build.call(aten.exp.default, build.x, layout=((3, 3), (1, 3)))
    return [build.call(aten.add.Tensor, term, build.x)]


def of_another_dtype(build: LocalGraphBuilder) -> list[fx.Node]:
    term = build.call(aten.argsort.default, build.x, dtype=torch.int64)
    return [build.call(aten.add.Tensor, term, build.x)]


def of_a_function(build: LocalGraphBuilder) -> list[fx.Node]:
    term = build.call(torch.relu, build.x)
    return [build.call(aten.add.Tensor, term, build.x)]


def read_by_a_function(build: LocalGraphBuilder) -> list[fx.Node]:
    term = build.call(aten.exp.default, build.x)
    alias = build.call(torch.ravel, term, layout=((9,), (1,)))
    return [build.call(aten.add.Tensor, term, build.x), alias]


@pytest.mark.parametrize(
    "make",
    [
        kept,
        returned,
        seen_by_a_view,
        added_to_its_view,
        a_view,
        added_to_itself,
        of_another_shape,
        in_another_order,
        of_another_dtype,
        of_a_function,
        read_by_a_function,
    ],
    ids=lambda make: make.__name__,
)
def test_a_sum_overwrites_no_other_term(make: Any):
    build = LocalGraphBuilder()
    assert aten.add_.Tensor not in build.run(*make(build))
