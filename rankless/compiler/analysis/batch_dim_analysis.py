"""What a batch cut in two would do to every value of a logical program: the basis for gathering calls into one step.

Note [cut in time]: calls that are gathered are rows of one batch that come one after another. So the rules that say
how an operator may be split over workers say, too, which values stay apart row by row (`Rows`), which are sums over
rows (`Sum`), and which do not know of rows (`Fixed`). What would need an exchange between the parts is `Lost`, with its
reason. Batch norm's statistics are each call's own; that is how gathering is defined.

Which numbers in a program are counts of rows shows by capturing it twice, for n rows and for three times as many.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from operator import getitem

import torch
from torch import fx

from rankless.compiler.analysis.batch_dim_kinds import (
    BATCH_NORM,
    CLAMPED,
    CONVERTED,
    DIVIDED,
    FACTOR,
    MADE,
    MEAN,
    MULTIPLIED,
    NLL,
    SHIFTED,
    VIEWED,
    Divisor,
    Fixed,
    Kind,
    Lost,
    Rows,
    Sum,
    argument_at,
    grouped,
    lies_so,
    literal_key,
    placed_as,
    ratio,
    same_along,
)
from rankless.compiler.ir.logical_program import LogicalProgram, ProgramInput, draws
from rankless.compiler.rules.pointwise import is_pointwise
from rankless.compiler.rules.reductions import mean_as_sum
from rankless.compiler.rules.strategy import Call, Strategy, call_of, shape_of
from rankless.compiler.rules.table import rule_for
from rankless.parallel.placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten


class RowKinds:
    """The kind of every value of `probe`, the program for FACTOR times the rows of `program`, node by node its twin.

    `dims` are the batch's dims of tensor arguments; `key_of` tells equal divisors apart from others.
    """

    def __init__(
        self, probe: LogicalProgram, program: LogicalProgram, dims: Mapping[int, int], key_of: Callable[[fx.Node], str]
    ) -> None:
        self.kinds: dict[fx.Node, Kind] = {}
        self._twins = dict(zip(probe.graph.nodes, program.graph.nodes, strict=True))
        self._key_of = key_of
        self.trained: set[fx.Node] = set()
        for node in probe.graph.nodes:
            if node.op == "output":
                continue
            if node in probe.inputs:
                self.kinds[node] = self._input(node, probe.inputs[node], program.inputs[self._twins[node]], dims)
                if probe.inputs[node].kind == "parameter":
                    self.trained.add(node)
            else:
                self.kinds[node] = self._checked(node, self._kind(node))
                if any(value in self.trained for value in node.all_input_nodes):
                    self.trained.add(node)

    def _input(self, node: fx.Node, given: ProgramInput, twin: ProgramInput, dims: Mapping[int, int]) -> Kind:
        """A batch has rows; a constant may be a number of them, as `torch.tensor(len(images))`."""
        if given.kind == "argument" and given.index in dims:
            return Rows(grouped(dims[given.index], shape_of(node)[dims[given.index]]))
        if given.constant is None or twin.constant is None or torch.equal(given.constant, twin.constant):
            return Fixed()
        grown = given.constant.dim() == 0 and ratio(float(given.constant), float(twin.constant)) == FACTOR
        return Sum(frozenset({None})) if grown else Lost("a constant that depends on how many rows there are", "")

    def _kind(self, node: fx.Node) -> Kind:
        if node.target is getitem:
            return self._output(node)
        inputs = [self.kinds[value] for value in node.all_input_nodes]
        if node.target in MADE:
            return self._of_fixed(node)
        if node.target in DIVIDED and len(inputs) == 2 and isinstance(inputs[0], Sum):
            divisor = self._divisor(node.all_input_nodes[1])
            if divisor is not None:
                return self._quotient(node, inputs[0], divisor)
        for kind in inputs:
            if isinstance(kind, Lost):
                return kind
        if any(isinstance(kind, Sum) for kind in inputs):
            return self._of_sums(node)
        if any(isinstance(kind, Rows) for kind in inputs):
            return self._of_rows(node)
        return self._of_fixed(node)

    def _checked(self, node: fx.Node, kind: Kind) -> Kind:
        """Only rows may grow with the batch: a value filled, stretched or drawn for each row has rows of its own."""
        value, twin = node.meta["val"], self._twins[node].meta["val"]
        if isinstance(kind, Lost) or isinstance(value, tuple | list):
            return kind
        grown = [dim for dim, size in enumerate(value.shape) if int(size) != int(twin.shape[dim])]
        if isinstance(kind, Rows):
            return kind if grown == [kind.placement.dim] else self._lost(node, "its size grows twice with the batch")
        if not grown:
            return kind
        if len(grown) == 1 and isinstance(kind, Fixed) and grown[0] in kind.alike:
            return Rows(grouped(grown[0], int(value.shape[grown[0]])))
        return self._lost(node, "a value of its own for each place in the batch, or a sum over it given to each row")

    def _output(self, node: fx.Node) -> Kind:
        """One output of an operator with several."""
        source, index = node.all_input_nodes[0], int(str(node.args[1]))
        kind = self.kinds[source]
        if isinstance(kind, Lost | Fixed):
            return kind
        if source.target in NLL and source.args[3] == MEAN:
            # What it divides by is written out by `denominators.counted`, in operators of its own.
            return kind if index == 0 else self._lost(node, "the number of valid targets of one call")
        if source.target in BATCH_NORM:
            return kind if index == 0 else self._lost(node, "the statistics of one call")
        strategy = self._strategy(self._call(source))
        return self._lost(node) if strategy is None else self._placed(source, strategy.outputs[index], strategy)

    def _of_fixed(self, node: fx.Node) -> Kind:
        scaled = self._scaled(node)
        filled = node.target in MADE and shape_of(node) == ()
        if scaled == [FACTOR] and (filled or node.target in MULTIPLIED):
            return Sum(frozenset({None}))
        if scaled:
            return self._lost(node, "a number that depends on how many rows there are")
        return Fixed(frozenset(self._alike(node)))

    def _alike(self, node: fx.Node) -> list[int]:
        """Dims along which a value without rows has the same in every entry."""
        value = node.meta["val"]
        if isinstance(value, tuple | list) or not isinstance(node.target, torch._ops.OpOverload):
            return []
        count = len(value.shape)
        inputs = [(item, self.kinds[item]) for item in node.all_input_nodes]
        everywhere = all(isinstance(kind, Fixed) and len(kind.alike) == len(shape_of(item)) for item, kind in inputs)
        drawn = draws(node) and node.target is not aten.randperm.default
        if node.target in MADE or (everywhere and (drawn or is_pointwise(node.target) or node.target in CONVERTED)):
            return list(range(count))
        if node.target is aten.embedding.default:
            indices = self.kinds[node.all_input_nodes[1]]
            return [dim for dim in range(count - 1) if isinstance(indices, Fixed) and dim in indices.alike]
        if node.target is not aten.expand.default and not is_pointwise(node.target):
            return []
        return [dim for dim in range(count) if all(same_along(item, kind, dim, count) for item, kind in inputs)]

    def _of_rows(self, node: fx.Node) -> Kind:
        call = self._call(node)
        scaled = self._scaled(node)
        if scaled:
            return self._rows_scaled(node, scaled)
        strategy = self._strategy(call)
        rows = [kind for kind in (self.kinds[item] for item in call.inputs) if isinstance(kind, Rows)]
        if node.target in VIEWED and (rows[0].outer > 1 or strategy is None):
            return self._regrouped(node, rows[0])
        outers = {kind.outer for kind in rows}
        if strategy is None or len(outers) > 1:
            return self._lost(node)
        result = self._of_apart(node, call, strategy)
        return replace(result, outer=outers.pop()) if isinstance(result, Rows) else result

    def _of_apart(self, node: fx.Node, call: Call, strategy: Strategy) -> Kind:
        """The kind of what a strategy gives for rows that stay apart."""
        overs = {kind.over for kind in (self.kinds[item] for item in call.inputs) if isinstance(kind, Rows)}
        if overs - {None}:
            over = next(iter(overs - {None}))
            if len(overs - {None}) > 1 or not self._linear_in_divided(call):
                return self._lost(node, "rows divided by their number are used in another way than summed")
            result = self._placed(node, strategy.outputs[0], strategy)
            if isinstance(result, Rows):
                return replace(result, over=over)
            is_plain = isinstance(result, Sum) and result.divisors == {None}
            return Sum(frozenset({over})) if is_plain else self._lost(node)
        # Of several outputs the first; which one is meant is seen at `getitem`.
        return self._placed(node, strategy.outputs[0], strategy)

    def _regrouped(self, node: fx.Node, kind: Rows) -> Kind:
        """Rows whose dim is flattened with dims before it, or parted again from those."""
        before, after, dim = shape_of(node.all_input_nodes[0]), shape_of(node), kind.placement.dim
        rows, outer = before[dim] // kind.outer, kind.outer
        # Dims after the batch's lie within a row, so they may be regrouped in any way.
        if outer == 1:
            for first in range(dim):
                if after[: first + 1] == (*before[:first], prod(before[first : dim + 1])):
                    times = prod(before[first:dim])
                    return replace(kind, placement=grouped(first, times * rows), outer=times)
        elif after[:dim] == before[:dim]:
            for place in range(dim + 1, len(after)):
                if prod(after[dim:place]) == outer and after[place] == rows:
                    return replace(kind, placement=grouped(place, rows), outer=1)
            if dim < len(after) and after[dim] == before[dim]:
                return kind
        return self._lost(node)

    def _rows_scaled(self, node: fx.Node, scaled: list[float]) -> Kind:
        """Rows times or over a number that is a count of rows."""
        (first,) = node.all_input_nodes[:1]
        kind = self.kinds[first]
        divided = (node.target in DIVIDED and scaled == [FACTOR]) or (
            node.target in MULTIPLIED and scaled == [1 / FACTOR]
        )
        if not divided or not isinstance(kind, Rows) or kind.over is not None or len(node.all_input_nodes) > 1:
            return self._lost(node, "a number that depends on how many rows there are")
        return replace(kind, over=Divisor(literal_key(), node, literal=True))

    def _of_sums(self, node: fx.Node) -> Kind:
        """Sums over rows pass what is linear; a sum over a sum, or over a number of rows, is a mean."""
        inputs = node.all_input_nodes
        kinds = [self.kinds[item] for item in inputs]
        if any(isinstance(kind, Rows) for kind in kinds):
            return self._lost(node, "each row is computed with a sum or mean over the whole batch")
        scaled = self._scaled(node)
        if scaled:
            return self._sum_scaled(node, scaled)
        if node.target in SHIFTED and len(inputs) == 1 and isinstance(kinds[0], Sum):
            return replace(kinds[0], constant=True)
        if node.target in CONVERTED:
            return kinds[0]
        call = self._call(node)
        rule = rule_for(call.operator)
        for strategy in () if rule is None else rule(call):
            wanted = strategy.inputs
            fits = all(
                isinstance(placement, Partial) or (isinstance(placement, Replicate) and isinstance(kind, Fixed))
                for kind, placement in zip((self.kinds[item] for item in call.inputs), wanted, strict=True)
            )
            if fits and all(isinstance(placement, Partial) for placement in strategy.outputs):
                return self._joined(call, wanted)
        return self._lost(node, "it is not linear in a sum or mean over the batch")

    def _joined(self, call: Call, wanted: tuple[Placement, ...]) -> Kind:
        """The terms of several sums together; a value without rows that is added is a constant term."""
        divisors: set[Divisor | None] = set()
        constant = False
        for item, placement in zip(call.inputs, wanted, strict=True):
            kind = self.kinds[item]
            if isinstance(kind, Sum):
                divisors |= kind.divisors
                constant |= kind.constant
            elif isinstance(placement, Partial):
                constant = True
        return Sum(frozenset(divisors), constant)

    def _sum_scaled(self, node: fx.Node, scaled: list[float]) -> Kind:
        """A sum over, or a mean times, a number that is a count of rows."""
        kind = self.kinds[node.all_input_nodes[0]]
        alone = len(node.all_input_nodes) == 1 and isinstance(kind, Sum) and not kind.constant
        over = (node.target in DIVIDED and scaled == [FACTOR]) or (node.target in MULTIPLIED and scaled == [1 / FACTOR])
        times = node.target in MULTIPLIED and scaled == [FACTOR]
        if alone and isinstance(kind, Sum):
            if over and kind.divisors == {None}:
                return Sum(frozenset({Divisor(literal_key(), node, literal=True)}))
            if times and all(divisor is not None and divisor.literal for divisor in kind.divisors):
                return Sum(frozenset({None}))
        return self._lost(node, "a number that depends on how many rows there are")

    def _divisor(self, below: fx.Node) -> Divisor | None:
        """A divisor that is a sum over rows, clamped or shifted perhaps; None for another."""
        plus, least, base = 0.0, None, below
        while base.target in CONVERTED and base.all_input_nodes:
            base = base.all_input_nodes[0]
        if base.target in CLAMPED and len(base.args) == 2:
            base, least = base.all_input_nodes[0], float(str(base.args[1]))
        elif base.target in (aten.add.Tensor, aten.add.Scalar) and len(base.all_input_nodes) == 1 and not base.kwargs:
            base, plus = base.all_input_nodes[0], float(str(base.args[1]))
        kind = self.kinds[base]
        if shape_of(base) != () or not isinstance(kind, Sum) or kind.divisors != {None} or kind.constant:
            return None
        return Divisor(self._key_of(base), base, literal=False, plus=plus, least=least)

    def _quotient(self, node: fx.Node, above: Sum, divisor: Divisor) -> Kind:
        """A sum over a sum: a mean, if the one below is a count."""
        if above.divisors != {None} or above.constant:
            return self._lost(node, "what is divided by a sum over the batch is no sum over it")
        if divisor.node in self.trained:
            return self._lost(node, "it is divided by a sum that depends on parameters")
        return Sum(frozenset({divisor}))

    def _call(self, node: fx.Node) -> Call:
        """The node with its inputs placed as a cut batch lies."""
        placements = {item: placed_as(self.kinds[item]) for item in node.all_input_nodes if item in self.kinds}
        return call_of(node, placements, 2)

    def _strategy(self, call: Call) -> Strategy | None:
        """The strategy that takes the inputs just as they lie."""
        rule = rule_for(call.operator)
        for strategy in () if rule is None else rule(call):
            if all(
                lies_so(self.kinds[item], wanted) for item, wanted in zip(call.inputs, strategy.inputs, strict=True)
            ):
                return strategy
        return None

    def _linear_in_divided(self, call: Call) -> bool:
        """Whether an operator is linear in its divided rows taken together."""
        if call.operator is aten.sum.default or call.operator is aten.sum.dim_IntList:
            return True
        divided = {item for item in call.inputs if isinstance(kind := self.kinds[item], Rows) and kind.over is not None}
        placements = {item: Partial() if item in divided else Replicate() for item in call.inputs}
        rule = rule_for(call.operator)
        strategies = () if rule is None else rule(replace(call, placements=placements))
        return any(
            isinstance(strategy.outputs[0], Partial)
            and all(
                isinstance(wanted, Partial) == (item in divided)
                for item, wanted in zip(call.inputs, strategy.inputs, strict=True)
            )
            for strategy in strategies
        )

    def _placed(self, node: fx.Node, placement: Placement, strategy: Strategy) -> Kind:
        """The kind of an output that lies so."""
        if isinstance(placement, Shard):
            return Rows(placement)
        if isinstance(placement, Partial) and placement.reduce_op == "sum":
            if strategy.lower is mean_as_sum:
                return Sum(frozenset({Divisor(literal_key(), node, literal=True)}))
            if node.target in NLL and node.args[3] == MEAN:
                return Sum(frozenset({Divisor(self._key_of(node), node, literal=False)}))
            return Sum(frozenset({None}))
        if node.target in MADE:
            return Fixed(frozenset(range(len(shape_of(node)))))
        return self._lost(node)

    def _scaled(self, node: fx.Node) -> list[float]:
        """Of the plain numbers that an operator computes with, those that grow with the rows: by how much."""
        found = []
        operator = node.target
        assert isinstance(operator, torch._ops.OpOverload), operator
        twin = self._twins[node]
        for position, described in enumerate(operator._schema.arguments):
            # A number may stand for a tensor, as in mul.Tensor(x, 0.5); sizes and dims are no values.
            if not any(word in str(described.type) for word in ("number", "float", "Tensor")):
                continue
            ours, theirs = argument_at(node, position, described.name), argument_at(twin, position, described.name)
            if isinstance(ours, int | float) and isinstance(theirs, int | float) and float(ours) != float(theirs):
                found.append(ratio(float(ours), float(theirs)))
        return found

    def _lost(self, node: fx.Node, reason: str | None = None) -> Lost:
        return Lost(reason or f"{node.target} mixes rows of the batch", str(node.meta.get("line", "")))
