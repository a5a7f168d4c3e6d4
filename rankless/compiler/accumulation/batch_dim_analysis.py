"""Batch-dim analysis: what a split of the batch in two does to each value of a logical program.

Note [split in time]: the calls gathered into one step (`accumulate=`) are rows of one batch, one call after the other.
The rules for splitting an operator over workers therefore also say which values stay separate per row (`BatchSharded`),
which are sums over rows (`BatchSum`), and which are independent of the batch (`BatchIndependent`). A value that would
need communication between the parts is `BatchMixed`, with a reason. Batch norm uses each call's own statistics, by the
definition of accumulation. Capturing the program twice, for n rows and for three times as many, shows which of its
numbers count rows.

Note [numbers of rows]: losses select the score of each row's label by `scores[torch.arange(len(labels)), labels]`, and
masks of attention in the transformers library select rows so. Split in time, a call has other numbers than the whole
batch, but each row still selects itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from operator import getitem

import sympy  # type: ignore[import-untyped]  # it has no stubs
import torch
from torch import fx

from rankless.compiler.accumulation.batch_dim_kinds import (
    ADD_OPS,
    BATCH_NORM_OPS,
    CLAMP_OPS,
    CONVERSION_OPS,
    DIV_OPS,
    FACTORY_OPS,
    GROWTH_FACTOR,
    LITERAL_KEY,
    MEAN_REDUCTION,
    MUL_OPS,
    NLL_OPS,
    VIEW_OPS,
    BatchDimKind,
    BatchIndependent,
    BatchMixed,
    BatchSharded,
    BatchSum,
    Normalizer,
    compute_growth,
    computes_with_count,
    find_growth,
    find_multiple,
    find_uniform_dims,
    get_argument,
    has_gradient,
    is_compatible,
    is_divided_by_rows,
    is_plain_rows,
    is_plain_sum,
    make_batch_shard,
    to_placement,
)
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue, ProgramInput
from rankless.compiler.rule_table import find_rule
from rankless.compiler.rules.reductions import lower_mean_as_sum
from rankless.compiler.rules.strategy import OperatorCall, Strategy, logical_shape, make_call
from rankless.compiler.selected_rows.rules import uses_row_numbers_rightly
from rankless.compiler.tracing.symbolic_sizes import list_traced_counts
from rankless.parallel.tensor_placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
ROW_DEPENDENT_NUMBER = "a number that depends on the rows of the batch"


class BatchDimAnalysis:
    """The kind of every value of `grown_program`, which is `program` captured for GROWTH_FACTOR times the rows.

    `dims` are the batch dims of tensor arguments; equal normalizers have equal `key_of`.
    """

    def __init__(
        self,
        grown_program: LogicalProgram,
        program: LogicalProgram,
        dims: Mapping[int, int],
        key_of: Callable[[fx.Node], str],
    ) -> None:
        self.kinds: dict[fx.Node, BatchDimKind] = {}
        self._counterparts = dict(zip(grown_program.graph.nodes, program.graph.nodes, strict=True))
        self._key_of = key_of
        self.trained_nodes: set[fx.Node] = set()
        """Values through which gradients reach parameters."""
        self._counts: set[sympy.Symbol] = set()
        """The numbers of rows of the batch that values select."""
        for node in grown_program.graph.nodes:
            if node.op == "output":
                continue
            if node in grown_program.inputs:
                self.kinds[node] = self._analyze_input(
                    node, grown_program.inputs[node], program.inputs[self._counterparts[node]], dims
                )
                if grown_program.inputs[node].kind == "parameter":
                    self.trained_nodes.add(node)
            else:
                self.kinds[node] = self._check_growth(node, self._analyze(node))
                self._note_counts(node)
                if has_gradient(node) and any(value in self.trained_nodes for value in node.all_input_nodes):
                    self.trained_nodes.add(node)

    def _note_counts(self, node: fx.Node) -> None:
        """Remember the number of a value's rows, if values have selected these from the batch."""
        kind = self.kinds[node]
        if isinstance(kind, BatchSharded) and isinstance(node.meta["val"], LogicalValue):
            self._counts.update(list_traced_counts(logical_shape(node)[kind.placement.dim]))

    def _analyze_input(
        self, node: fx.Node, program_input: ProgramInput, counterpart: ProgramInput, dims: Mapping[int, int]
    ) -> BatchDimKind:
        """Return the kind of an input; a constant may count rows, as `torch.tensor(len(images))` does."""
        if program_input.kind == "argument" and program_input.index in dims:
            return BatchSharded(
                make_batch_shard(dims[program_input.index], logical_shape(node)[dims[program_input.index]])
            )
        if (
            program_input.constant is None
            or counterpart.constant is None
            or torch.equal(program_input.constant, counterpart.constant)
        ):
            return BatchIndependent()
        grown = (
            program_input.constant.dim() == 0
            and compute_growth(float(program_input.constant), float(counterpart.constant)) == GROWTH_FACTOR
        )
        if grown:
            return BatchSum(frozenset({None}))
        return BatchMixed("a constant that depends on the number of rows", "")

    def _analyze(self, node: fx.Node) -> BatchDimKind:
        if node.target is getitem:
            return self._analyze_output(node)
        inputs = [self.kinds[value] for value in node.all_input_nodes]
        if node.target in FACTORY_OPS:
            return self._analyze_independent(node)
        if node.target in DIV_OPS and len(inputs) == 2 and isinstance(inputs[0], BatchSum | BatchSharded):
            normalizer = self._find_normalizer(node.all_input_nodes[1])
            if normalizer is not None:
                return self._divide(node, inputs[0], normalizer)
        for kind in inputs:
            if isinstance(kind, BatchMixed):
                return kind
        if computes_with_count(node):
            return self._divide_by_count(node)
        if any(isinstance(kind, BatchSharded) and kind.is_number for kind in inputs):
            return self._analyze_row_numbers(node)
        if any(isinstance(kind, BatchSum) for kind in inputs):
            return self._analyze_sums(node)
        if any(isinstance(kind, BatchSharded) for kind in inputs):
            return self._analyze_sharded(node)
        return self._analyze_independent(node)

    def _divide_by_count(self, node: fx.Node) -> BatchDimKind:
        """Analyze a sum, or rows that are summed afterwards, divided by a number of rows that values select."""
        if node.target in DIV_OPS and len(node.all_input_nodes) == 1 and self._find_counts(node, "other"):
            kind = self.kinds[node.all_input_nodes[0]]
            normalizer = Normalizer(LITERAL_KEY, node, is_literal=True)
            if isinstance(kind, BatchSum) and is_plain_sum(kind):
                return BatchSum(frozenset({normalizer}))
            if is_plain_rows(kind):
                return replace(kind, normalizer=normalizer)
        return self._mixed(node, "a number of selected rows that is more than what a sum over them is divided by")

    def _find_counts(self, node: fx.Node, name: str) -> bool:
        """Return whether an operator's second number is a fixed multiple of numbers of selected rows of the batch."""
        ours, theirs = (find_multiple(get_argument(item, 1, name)) for item in (node, self._counterparts[node]))
        if ours is None or theirs is None or not ours.keys() <= self._counts:
            return False
        return [*ours.values()] == [*theirs.values()]

    def _check_growth(self, node: fx.Node, kind: BatchDimKind) -> BatchDimKind:
        """Check that only rows grow with the batch; a value filled, broadcast or drawn per row has rows of its own."""
        value, counterpart = node.meta["val"], self._counterparts[node].meta["val"]
        if isinstance(kind, BatchMixed) or isinstance(value, tuple | list):
            return kind
        pairs = list(zip(value.shape, counterpart.shape, strict=True))
        # What the job has read to be some number may stand for a count in one of the two programs.
        counted = [bool(list_traced_counts(size) or list_traced_counts(other)) for size, other in pairs]
        grown = [dim for dim, (size, other) in enumerate(pairs) if not counted[dim] and int(size) != int(other)]
        if isinstance(kind, BatchSharded):
            own = kind.placement.dim
            is_right = grown == ([] if counted[own] else [own])
            return kind if is_right else self._mixed(node, "its size grows twice with the batch")
        if not grown:
            return kind
        if len(grown) == 1 and isinstance(kind, BatchIndependent) and grown[0] in kind.uniform_dims:
            return BatchSharded(make_batch_shard(grown[0], int(value.shape[grown[0]])))
        return self._mixed(
            node, "a separate value for each row of the batch, or a sum over the batch passed to each row"
        )

    def _analyze_output(self, node: fx.Node) -> BatchDimKind:
        """Return the kind of one output of an operator with several."""
        source, index = node.all_input_nodes[0], int(str(node.args[1]))
        kind = self.kinds[source]
        if isinstance(kind, BatchMixed | BatchIndependent):
            return kind
        if source.target in NLL_OPS and source.args[3] == MEAN_REDUCTION:
            # `add_loss_normalizers` adds operators that compute what it divides by.
            return kind if index == 0 else self._mixed(node, "the number of valid targets of one call")
        if source.target in BATCH_NORM_OPS:
            return kind if index == 0 else self._mixed(node, "the statistics of one call")
        strategy = self._find_strategy(self._make_call(source))
        if strategy is None:
            return self._mixed(node)
        return self._analyze_placement(source, strategy.outputs[index], strategy)

    def _analyze_independent(self, node: fx.Node) -> BatchDimKind:
        growth = find_growth(node, self._counterparts[node])
        filled = node.target in FACTORY_OPS and logical_shape(node) == ()
        if computes_with_count(node):
            is_count = filled and self._find_counts(node, "fill_value")
            return BatchSum(frozenset({None})) if is_count else self._mixed(node, ROW_DEPENDENT_NUMBER)
        if growth == [GROWTH_FACTOR] and (filled or node.target in MUL_OPS):
            return BatchSum(frozenset({None}))
        if counts_rows(node, growth):
            return BatchSharded(make_batch_shard(0, logical_shape(node)[0]), is_number=True)
        if growth:
            return self._mixed(node, ROW_DEPENDENT_NUMBER)
        return BatchIndependent(frozenset(find_uniform_dims(node, self.kinds)))

    def _analyze_row_numbers(self, node: fx.Node) -> BatchDimKind:
        """Analyze an operator on the numbers of rows: it may reshape them, or select each row by its number."""
        if node.target in RESHAPING_OPS:
            kind = self._analyze_sharded(node)
            return replace(kind, is_number=True) if isinstance(kind, BatchSharded) else kind
        selected = find_selected_rows(node, self._counterparts[node], self.kinds)
        return selected or self._mixed(node, ROW_DEPENDENT_NUMBER)

    def _analyze_sharded(self, node: fx.Node) -> BatchDimKind:
        call = self._make_call(node)
        growth = find_growth(node, self._counterparts[node])
        if growth:
            return self._scale_sharded(node, growth)
        strategy = self._find_strategy(call)
        if not uses_row_numbers_rightly(node, strategy):
            return self._mixed(node, "numbers of selected rows, used for something else than to read or write these")
        sharded_inputs = [kind for kind in (self.kinds[item] for item in call.inputs) if isinstance(kind, BatchSharded)]
        if node.target in VIEW_OPS and (sharded_inputs[0].outer_size > 1 or strategy is None):
            return self._analyze_view(node, sharded_inputs[0])
        outer_sizes = {kind.outer_size for kind in sharded_inputs}
        if strategy is None or len(outer_sizes) > 1:
            return self._mixed(node)
        result = self._analyze_split(node, call, strategy)
        return replace(result, outer_size=outer_sizes.pop()) if isinstance(result, BatchSharded) else result

    def _analyze_split(self, node: fx.Node, call: OperatorCall, strategy: Strategy) -> BatchDimKind:
        """Return the kind of what a strategy computes from rows that stay separate."""
        normalizers_seen = {
            kind.normalizer for kind in (self.kinds[item] for item in call.inputs) if isinstance(kind, BatchSharded)
        }
        if normalizers_seen - {None}:
            normalizer = next(iter(normalizers_seen - {None}))
            if len(normalizers_seen - {None}) > 1 or not self._is_linear_in_normalized(call):
                return self._mixed(node, "rows divided by their number are not summed afterwards")
            result = self._analyze_placement(node, strategy.outputs[0], strategy)
            if isinstance(result, BatchSharded):
                return replace(result, normalizer=normalizer)
            is_plain = isinstance(result, BatchSum) and result.normalizers == {None}
            return BatchSum(frozenset({normalizer})) if is_plain else self._mixed(node)
        # For several outputs, take the first. `getitem` picks the right one.
        return self._analyze_placement(node, strategy.outputs[0], strategy)

    def _analyze_view(self, node: fx.Node, kind: BatchSharded) -> BatchDimKind:
        """Analyze a view that flattens the batch dim with dims before it, or splits them again."""
        before, after, dim = logical_shape(node.all_input_nodes[0]), logical_shape(node), kind.placement.dim
        rows, outer_size = before[dim] // kind.outer_size, kind.outer_size
        # Dims after the batch dim lie within a row, so a view may regroup them in any way.
        if outer_size == 1:
            for first in range(dim):
                if after[: first + 1] == (*before[:first], prod(before[first : dim + 1])):
                    times = prod(before[first:dim])
                    return replace(kind, placement=make_batch_shard(first, times * rows), outer_size=times)
        elif after[:dim] == before[:dim]:
            for position in range(dim + 1, len(after)):
                if prod(after[dim:position]) == outer_size and after[position] == rows:
                    return replace(kind, placement=make_batch_shard(position, rows), outer_size=1)
            if dim < len(after) and after[dim] == before[dim]:
                return kind
        return self._mixed(node)

    def _scale_sharded(self, node: fx.Node, growth: list[float]) -> BatchDimKind:
        """Analyze rows multiplied or divided by a number of rows."""
        (first,) = node.all_input_nodes[:1]
        kind = self.kinds[first]
        divided = is_divided_by_rows(node, growth) and len(node.all_input_nodes) == 1
        if divided and isinstance(kind, BatchSharded) and kind.normalizer is None:
            return replace(kind, normalizer=Normalizer(LITERAL_KEY, node, is_literal=True))
        return self._mixed(node, ROW_DEPENDENT_NUMBER)

    def _analyze_sums(self, node: fx.Node) -> BatchDimKind:
        """Analyze operators on sums over rows: linear operators keep them, and division by a count makes a mean."""
        inputs = node.all_input_nodes
        kinds = [self.kinds[item] for item in inputs]
        if any(isinstance(kind, BatchSharded) for kind in kinds):
            return self._mixed(node, "each row is computed with a sum or mean over the whole batch")
        growth = find_growth(node, self._counterparts[node])
        if growth:
            return self._scale_sum(node, growth)
        if node.target in ADD_OPS and len(inputs) == 1 and isinstance(kinds[0], BatchSum):
            return replace(kinds[0], is_shifted=True)
        if node.target in CONVERSION_OPS:
            return kinds[0]
        call = self._make_call(node)
        rule = find_rule(call.operator)
        for strategy in () if rule is None else rule(call):
            required = strategy.inputs
            fits = all(
                isinstance(placement, Partial)
                or (isinstance(placement, Replicate) and isinstance(kind, BatchIndependent))
                for kind, placement in zip((self.kinds[item] for item in call.inputs), required, strict=True)
            )
            if fits and all(isinstance(placement, Partial) for placement in strategy.outputs):
                return self._add_terms(call, required)
        return self._mixed(node, "it is not linear in a sum or mean over the batch")

    def _add_terms(self, call: OperatorCall, required: tuple[Placement, ...]) -> BatchDimKind:
        """Combine the terms of several sums; an added batch-independent value is a constant term."""
        normalizers: set[Normalizer | None] = set()
        has_constant = is_shifted = False
        for item, placement in zip(call.inputs, required, strict=True):
            kind = self.kinds[item]
            if isinstance(kind, BatchSum):
                normalizers |= kind.normalizers
                has_constant |= kind.has_constant
                is_shifted |= kind.is_shifted
            elif isinstance(placement, Partial):
                has_constant |= item in self.trained_nodes
                is_shifted = True
        return BatchSum(frozenset(normalizers), has_constant, is_shifted)

    def _scale_sum(self, node: fx.Node, growth: list[float]) -> BatchDimKind:
        """Analyze a sum divided by, or a mean multiplied by, a number of rows."""
        kind = self.kinds[node.all_input_nodes[0]]
        alone = len(node.all_input_nodes) == 1 and isinstance(kind, BatchSum) and not kind.has_constant
        times = node.target in MUL_OPS and growth == [GROWTH_FACTOR]
        if alone and isinstance(kind, BatchSum):
            if is_divided_by_rows(node, growth) and kind.normalizers == {None}:
                return BatchSum(frozenset({Normalizer(LITERAL_KEY, node, is_literal=True)}))
            if times and all(normalizer is not None and normalizer.is_literal for normalizer in kind.normalizers):
                return BatchSum(frozenset({None}))
        return self._mixed(node, ROW_DEPENDENT_NUMBER)

    def _find_normalizer(self, divisor: fx.Node) -> Normalizer | None:
        """Return a divisor that is a sum over rows, possibly clamped or shifted; None for any other divisor."""
        offset, minimum, base = 0.0, None, divisor
        while base.target in CONVERSION_OPS and base.all_input_nodes:
            base = base.all_input_nodes[0]
        if base.target in CLAMP_OPS and len(base.args) == 2:
            base, minimum = base.all_input_nodes[0], float(str(base.args[1]))
        elif base.target in (aten.add.Tensor, aten.add.Scalar) and len(base.all_input_nodes) == 1 and not base.kwargs:
            base, offset = base.all_input_nodes[0], float(str(base.args[1]))
        kind = self.kinds[base]
        if logical_shape(base) != () or not is_plain_sum(kind) or kind.is_shifted:
            return None
        return Normalizer(self._key_of(base), base, is_literal=False, offset=offset, minimum=minimum)

    def _divide(self, node: fx.Node, dividend: BatchSum | BatchSharded, normalizer: Normalizer) -> BatchDimKind:
        """Analyze a sum, or rows that are summed afterwards, divided by a sum: a mean, if the divisor is a count."""
        if normalizer.node in self.trained_nodes:
            return self._mixed(node, "the divisor is a sum that depends on parameters")
        if is_plain_rows(dividend):
            return replace(dividend, normalizer=normalizer)
        if not is_plain_sum(dividend):
            return self._mixed(node, "the dividend of a sum over the batch is not a sum over it")
        return BatchSum(frozenset({normalizer}))

    def _make_call(self, node: fx.Node) -> OperatorCall:
        """Return the node as a call whose inputs are placed as in a split batch."""
        placements = {item: to_placement(self.kinds[item]) for item in node.all_input_nodes if item in self.kinds}
        return make_call(node, placements, 2)

    def _find_strategy(self, call: OperatorCall) -> Strategy | None:
        """Return the strategy that needs no redistribution of the inputs, and nothing of other pieces; None if none."""
        rule = find_rule(call.operator)
        for strategy in () if rule is None else rule(call):
            if not strategy.joins_pieces and all(
                is_compatible(self.kinds[item], required)
                for item, required in zip(call.inputs, strategy.inputs, strict=True)
            ):
                return strategy
        return None

    def _is_linear_in_normalized(self, call: OperatorCall) -> bool:
        """Return whether an operator is linear in its normalized rows taken together."""
        if call.operator is aten.sum.default or call.operator is aten.sum.dim_IntList:
            return True
        divided = {
            item
            for item in call.inputs
            if isinstance(kind := self.kinds[item], BatchSharded) and kind.normalizer is not None
        }
        placements = {item: Partial() if item in divided else Replicate() for item in call.inputs}
        rule = find_rule(call.operator)
        strategies = () if rule is None else rule(replace(call, placements=placements))
        return any(
            isinstance(strategy.outputs[0], Partial)
            and all(
                isinstance(required, Partial) == (item in divided)
                for item, required in zip(call.inputs, strategy.inputs, strict=True)
            )
            for strategy in strategies
        )

    def _analyze_placement(self, node: fx.Node, placement: Placement, strategy: Strategy) -> BatchDimKind:
        """Return the kind of an output with this placement."""
        if isinstance(placement, Shard):
            return BatchSharded(placement)
        if isinstance(placement, Partial) and placement.reduce_op == "sum":
            if strategy.lower is lower_mean_as_sum:
                return BatchSum(frozenset({Normalizer(LITERAL_KEY, node, is_literal=True)}))
            if node.target in NLL_OPS and node.args[3] == MEAN_REDUCTION:
                return BatchSum(frozenset({Normalizer(self._key_of(node), node, is_literal=False)}))
            return BatchSum(frozenset({None}))
        if node.target in FACTORY_OPS:
            return BatchIndependent(frozenset(range(len(logical_shape(node)))))
        return self._mixed(node)

    def _mixed(self, node: fx.Node, reason: str | None = None) -> BatchMixed:
        return BatchMixed(reason or f"{node.target} mixes rows of the batch", str(node.meta.get("line", "")))


ARANGE_OPS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
RESHAPING_OPS = (aten.unsqueeze.default, aten.expand.default, aten.clone.default, *VIEW_OPS)
"""Operators that keep the elements as they are."""


def counts_rows(node: fx.Node, growth: list[float]) -> bool:
    """Return whether an operator returns the numbers of all rows, given how much its numbers grow with the rows."""
    first = node.args[0] if len(node.args) > 1 else 0
    step = node.args[2] if len(node.args) > 2 else 1
    return node.target in ARANGE_OPS and growth == [GROWTH_FACTOR] and (first, step) == (0, 1)


def find_selected_rows(
    node: fx.Node, counterpart: fx.Node, kinds: Mapping[fx.Node, BatchDimKind]
) -> BatchSharded | None:
    """Return the kind of a value that selects each row of another one by its number; None for any other value.

    Args:
        counterpart: The same operator in the program of fewer rows.
    """
    if node.target is not aten.index.Tensor:
        return None
    source, indices = node.all_input_nodes[0], node.args[1]
    kind = kinds[source]
    assert isinstance(indices, list | tuple)
    found = {place: kinds[item] for place, item in enumerate(indices) if isinstance(item, fx.Node)}
    numbered = [place for place, item in found.items() if isinstance(item, BatchSharded) and item.is_number]
    others = [item for place, item in found.items() if place not in numbered]
    if not isinstance(kind, BatchSharded) or numbered != [kind.placement.dim]:
        return None
    if not all(isinstance(item, BatchIndependent) or is_plain_rows(item) for item in (kind, *others)):
        return None
    before = logical_shape(counterpart)
    grown = [dim for dim, size in enumerate(logical_shape(node)) if size != before[dim]]
    if len(grown) != 1:  # else all that has rows of the batch has them in this dim
        return None
    return BatchSharded(make_batch_shard(grown[0], logical_shape(node)[grown[0]]))
