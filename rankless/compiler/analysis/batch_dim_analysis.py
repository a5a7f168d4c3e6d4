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
    get_argument,
    is_compatible,
    is_uniform_along,
    make_batch_shard,
    to_placement,
)
from rankless.compiler.ir.logical_program import LogicalProgram, ProgramInput, is_random_node
from rankless.compiler.rules.pointwise import is_pointwise
from rankless.compiler.rules.reductions import lower_mean_as_sum
from rankless.compiler.rules.strategy import OperatorCall, Strategy, logical_shape, make_call
from rankless.compiler.rules.table import find_rule
from rankless.parallel.placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten


class BatchDimAnalysis:
    """The kind of every value of `probe`, the program for FACTOR times the rows of `program`, node by node its twin.

    `dims` are the batch's dims of tensor arguments; `key_of` tells equal divisors apart from others.
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
                if any(value in self.trained_nodes for value in node.all_input_nodes):
                    self.trained_nodes.add(node)

    def _analyze_input(
        self, node: fx.Node, given: ProgramInput, counterpart: ProgramInput, dims: Mapping[int, int]
    ) -> BatchDimKind:
        """A batch has rows; a constant may be a number of them, as `torch.tensor(len(images))`."""
        if given.kind == "argument" and given.index in dims:
            return BatchSharded(make_batch_shard(dims[given.index], logical_shape(node)[dims[given.index]]))
        if given.constant is None or counterpart.constant is None or torch.equal(given.constant, counterpart.constant):
            return BatchIndependent()
        grown = (
            given.constant.dim() == 0
            and compute_growth(float(given.constant), float(counterpart.constant)) == GROWTH_FACTOR
        )
        return (
            BatchSum(frozenset({None}))
            if grown
            else BatchMixed("a constant that depends on how many rows there are", "")
        )

    def _analyze(self, node: fx.Node) -> BatchDimKind:
        if node.target is getitem:
            return self._analyze_output(node)
        inputs = [self.kinds[value] for value in node.all_input_nodes]
        if node.target in FACTORY_OPS:
            return self._analyze_independent(node)
        if node.target in DIV_OPS and len(inputs) == 2 and isinstance(inputs[0], BatchSum):
            normalizer = self._find_normalizer(node.all_input_nodes[1])
            if normalizer is not None:
                return self._divide(node, inputs[0], normalizer)
        for kind in inputs:
            if isinstance(kind, BatchMixed):
                return kind
        if any(isinstance(kind, BatchSum) for kind in inputs):
            return self._analyze_sums(node)
        if any(isinstance(kind, BatchSharded) for kind in inputs):
            return self._analyze_sharded(node)
        return self._analyze_independent(node)

    def _check_growth(self, node: fx.Node, kind: BatchDimKind) -> BatchDimKind:
        """Only rows may grow with the batch: a value filled, stretched or drawn for each row has rows of its own."""
        value, counterpart = node.meta["val"], self._counterparts[node].meta["val"]
        if isinstance(kind, BatchMixed) or isinstance(value, tuple | list):
            return kind
        grown = [dim for dim, size in enumerate(value.shape) if int(size) != int(counterpart.shape[dim])]
        if isinstance(kind, BatchSharded):
            return kind if grown == [kind.placement.dim] else self._mixed(node, "its size grows twice with the batch")
        if not grown:
            return kind
        if len(grown) == 1 and isinstance(kind, BatchIndependent) and grown[0] in kind.uniform_dims:
            return BatchSharded(make_batch_shard(grown[0], int(value.shape[grown[0]])))
        return self._mixed(node, "a value of its own for each place in the batch, or a sum over it given to each row")

    def _analyze_output(self, node: fx.Node) -> BatchDimKind:
        """One output of an operator with several."""
        source, index = node.all_input_nodes[0], int(str(node.args[1]))
        kind = self.kinds[source]
        if isinstance(kind, BatchMixed | BatchIndependent):
            return kind
        if source.target in NLL_OPS and source.args[3] == MEAN_REDUCTION:
            # What it divides by is written out by `denominators.counted`, in operators of its own.
            return kind if index == 0 else self._mixed(node, "the number of valid targets of one call")
        if source.target in BATCH_NORM_OPS:
            return kind if index == 0 else self._mixed(node, "the statistics of one call")
        strategy = self._find_strategy(self._make_call(source))
        return (
            self._mixed(node)
            if strategy is None
            else self._analyze_placement(source, strategy.outputs[index], strategy)
        )

    def _analyze_independent(self, node: fx.Node) -> BatchDimKind:
        growth = self._find_growth(node)
        filled = node.target in FACTORY_OPS and logical_shape(node) == ()
        if growth == [GROWTH_FACTOR] and (filled or node.target in MUL_OPS):
            return BatchSum(frozenset({None}))
        if growth:
            return self._mixed(node, "a number that depends on how many rows there are")
        return BatchIndependent(frozenset(self._find_uniform_dims(node)))

    def _find_uniform_dims(self, node: fx.Node) -> list[int]:
        """Dims along which a value without rows has the same in every entry."""
        value = node.meta["val"]
        if isinstance(value, tuple | list) or not isinstance(node.target, torch._ops.OpOverload):
            return []
        count = len(value.shape)
        inputs = [(item, self.kinds[item]) for item in node.all_input_nodes]
        everywhere = all(
            isinstance(kind, BatchIndependent) and len(kind.uniform_dims) == len(logical_shape(item))
            for item, kind in inputs
        )
        drawn = is_random_node(node) and node.target is not aten.randperm.default
        if node.target in FACTORY_OPS or (
            everywhere and (drawn or is_pointwise(node.target) or node.target in CONVERSION_OPS)
        ):
            return list(range(count))
        if node.target is aten.embedding.default:
            indices = self.kinds[node.all_input_nodes[1]]
            return [
                dim for dim in range(count - 1) if isinstance(indices, BatchIndependent) and dim in indices.uniform_dims
            ]
        if node.target is not aten.expand.default and not is_pointwise(node.target):
            return []
        return [dim for dim in range(count) if all(is_uniform_along(item, kind, dim, count) for item, kind in inputs)]

    def _analyze_sharded(self, node: fx.Node) -> BatchDimKind:
        call = self._make_call(node)
        growth = self._find_growth(node)
        if growth:
            return self._scale_sharded(node, growth)
        strategy = self._find_strategy(call)
        rows = [kind for kind in (self.kinds[item] for item in call.inputs) if isinstance(kind, BatchSharded)]
        if node.target in VIEW_OPS and (rows[0].outer_size > 1 or strategy is None):
            return self._analyze_view(node, rows[0])
        outers = {kind.outer_size for kind in rows}
        if strategy is None or len(outers) > 1:
            return self._mixed(node)
        result = self._analyze_split(node, call, strategy)
        return replace(result, outer_size=outers.pop()) if isinstance(result, BatchSharded) else result

    def _analyze_split(self, node: fx.Node, call: OperatorCall, strategy: Strategy) -> BatchDimKind:
        """The kind of what a strategy gives for rows that stay apart."""
        normalizers_seen = {
            kind.normalizer for kind in (self.kinds[item] for item in call.inputs) if isinstance(kind, BatchSharded)
        }
        if normalizers_seen - {None}:
            normalizer = next(iter(normalizers_seen - {None}))
            if len(normalizers_seen - {None}) > 1 or not self._is_linear_in_normalized(call):
                return self._mixed(node, "rows divided by their number are used in another way than summed")
            result = self._analyze_placement(node, strategy.outputs[0], strategy)
            if isinstance(result, BatchSharded):
                return replace(result, normalizer=normalizer)
            is_plain = isinstance(result, BatchSum) and result.normalizers == {None}
            return BatchSum(frozenset({normalizer})) if is_plain else self._mixed(node)
        # Of several outputs the first; which one is meant is seen at `getitem`.
        return self._analyze_placement(node, strategy.outputs[0], strategy)

    def _analyze_view(self, node: fx.Node, kind: BatchSharded) -> BatchDimKind:
        """Rows whose dim is flattened with dims before it, or parted again from those."""
        before, after, dim = logical_shape(node.all_input_nodes[0]), logical_shape(node), kind.placement.dim
        rows, outer_size = before[dim] // kind.outer_size, kind.outer_size
        # Dims after the batch's lie within a row, so they may be regrouped in any way.
        if outer_size == 1:
            for first in range(dim):
                if after[: first + 1] == (*before[:first], prod(before[first : dim + 1])):
                    times = prod(before[first:dim])
                    return replace(kind, placement=make_batch_shard(first, times * rows), outer_size=times)
        elif after[:dim] == before[:dim]:
            for place in range(dim + 1, len(after)):
                if prod(after[dim:place]) == outer_size and after[place] == rows:
                    return replace(kind, placement=make_batch_shard(place, rows), outer_size=1)
            if dim < len(after) and after[dim] == before[dim]:
                return kind
        return self._mixed(node)

    def _scale_sharded(self, node: fx.Node, growth: list[float]) -> BatchDimKind:
        """Rows times or over a number that is a count of rows."""
        (first,) = node.all_input_nodes[:1]
        kind = self.kinds[first]
        divided = (node.target in DIV_OPS and growth == [GROWTH_FACTOR]) or (
            node.target in MUL_OPS and growth == [1 / GROWTH_FACTOR]
        )
        if (
            not divided
            or not isinstance(kind, BatchSharded)
            or kind.normalizer is not None
            or len(node.all_input_nodes) > 1
        ):
            return self._mixed(node, "a number that depends on how many rows there are")
        return replace(kind, normalizer=Normalizer(LITERAL_KEY, node, is_literal=True))

    def _analyze_sums(self, node: fx.Node) -> BatchDimKind:
        """Sums over rows pass what is linear; a sum over a sum, or over a number of rows, is a mean."""
        inputs = node.all_input_nodes
        kinds = [self.kinds[item] for item in inputs]
        if any(isinstance(kind, BatchSharded) for kind in kinds):
            return self._mixed(node, "each row is computed with a sum or mean over the whole batch")
        growth = self._find_growth(node)
        if growth:
            return self._scale_sum(node, growth)
        if node.target in ADD_OPS and len(inputs) == 1 and isinstance(kinds[0], BatchSum):
            return replace(kinds[0], has_constant=True)
        if node.target in CONVERSION_OPS:
            return kinds[0]
        call = self._make_call(node)
        rule = find_rule(call.operator)
        for strategy in () if rule is None else rule(call):
            wanted = strategy.inputs
            fits = all(
                isinstance(placement, Partial)
                or (isinstance(placement, Replicate) and isinstance(kind, BatchIndependent))
                for kind, placement in zip((self.kinds[item] for item in call.inputs), wanted, strict=True)
            )
            if fits and all(isinstance(placement, Partial) for placement in strategy.outputs):
                return self._add_terms(call, wanted)
        return self._mixed(node, "it is not linear in a sum or mean over the batch")

    def _add_terms(self, call: OperatorCall, wanted: tuple[Placement, ...]) -> BatchDimKind:
        """The terms of several sums together; a value without rows that is added is a constant term."""
        normalizers: set[Normalizer | None] = set()
        has_constant = False
        for item, placement in zip(call.inputs, wanted, strict=True):
            kind = self.kinds[item]
            if isinstance(kind, BatchSum):
                normalizers |= kind.normalizers
                has_constant |= kind.has_constant
            elif isinstance(placement, Partial):
                has_constant = True
        return BatchSum(frozenset(normalizers), has_constant)

    def _scale_sum(self, node: fx.Node, growth: list[float]) -> BatchDimKind:
        """A sum over, or a mean times, a number that is a count of rows."""
        kind = self.kinds[node.all_input_nodes[0]]
        alone = len(node.all_input_nodes) == 1 and isinstance(kind, BatchSum) and not kind.has_constant
        normalizer = (node.target in DIV_OPS and growth == [GROWTH_FACTOR]) or (
            node.target in MUL_OPS and growth == [1 / GROWTH_FACTOR]
        )
        times = node.target in MUL_OPS and growth == [GROWTH_FACTOR]
        if alone and isinstance(kind, BatchSum):
            if normalizer and kind.normalizers == {None}:
                return BatchSum(frozenset({Normalizer(LITERAL_KEY, node, is_literal=True)}))
            if times and all(normalizer is not None and normalizer.is_literal for normalizer in kind.normalizers):
                return BatchSum(frozenset({None}))
        return self._mixed(node, "a number that depends on how many rows there are")

    def _find_normalizer(self, below: fx.Node) -> Normalizer | None:
        """A divisor that is a sum over rows, clamped or shifted perhaps; None for another."""
        offset, minimum, base = 0.0, None, below
        while base.target in CONVERSION_OPS and base.all_input_nodes:
            base = base.all_input_nodes[0]
        if base.target in CLAMP_OPS and len(base.args) == 2:
            base, minimum = base.all_input_nodes[0], float(str(base.args[1]))
        elif base.target in (aten.add.Tensor, aten.add.Scalar) and len(base.all_input_nodes) == 1 and not base.kwargs:
            base, offset = base.all_input_nodes[0], float(str(base.args[1]))
        kind = self.kinds[base]
        if (
            logical_shape(base) != ()
            or not isinstance(kind, BatchSum)
            or kind.normalizers != {None}
            or kind.has_constant
        ):
            return None
        return Normalizer(self._key_of(base), base, is_literal=False, offset=offset, minimum=minimum)

    def _divide(self, node: fx.Node, above: BatchSum, normalizer: Normalizer) -> BatchDimKind:
        """A sum over a sum: a mean, if the one below is a count."""
        if above.normalizers != {None} or above.has_constant:
            return self._mixed(node, "what is divided by a sum over the batch is no sum over it")
        if normalizer.node in self.trained_nodes:
            return self._mixed(node, "it is divided by a sum that depends on parameters")
        return BatchSum(frozenset({normalizer}))

    def _make_call(self, node: fx.Node) -> OperatorCall:
        """The node with its inputs placed as a cut batch lies."""
        placements = {item: to_placement(self.kinds[item]) for item in node.all_input_nodes if item in self.kinds}
        return make_call(node, placements, 2)

    def _find_strategy(self, call: OperatorCall) -> Strategy | None:
        """The strategy that takes the inputs just as they lie."""
        rule = find_rule(call.operator)
        for strategy in () if rule is None else rule(call):
            if all(
                is_compatible(self.kinds[item], wanted)
                for item, wanted in zip(call.inputs, strategy.inputs, strict=True)
            ):
                return strategy
        return None

    def _is_linear_in_normalized(self, call: OperatorCall) -> bool:
        """Whether an operator is linear in its divided rows taken together."""
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
                isinstance(wanted, Partial) == (item in divided)
                for item, wanted in zip(call.inputs, strategy.inputs, strict=True)
            )
            for strategy in strategies
        )

    def _analyze_placement(self, node: fx.Node, placement: Placement, strategy: Strategy) -> BatchDimKind:
        """The kind of an output that lies so."""
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

    def _find_growth(self, node: fx.Node) -> list[float]:
        """Of the plain numbers that an operator computes with, those that grow with the rows: by how much."""
        found = []
        operator = node.target
        assert isinstance(operator, torch._ops.OpOverload), operator
        counterpart = self._counterparts[node]
        for position, described in enumerate(operator._schema.arguments):
            # A number may stand for a tensor, as in mul.Tensor(x, 0.5); sizes and dims are no values.
            if not any(word in str(described.type) for word in ("number", "float", "Tensor")):
                continue
            ours, theirs = (
                get_argument(node, position, described.name),
                get_argument(counterpart, position, described.name),
            )
            if isinstance(ours, int | float) and isinstance(theirs, int | float) and float(ours) != float(theirs):
                found.append(compute_growth(float(ours), float(theirs)))
        return found

    def _mixed(self, node: fx.Node, reason: str | None = None) -> BatchMixed:
        return BatchMixed(reason or f"{node.target} mixes rows of the batch", str(node.meta.get("line", "")))
