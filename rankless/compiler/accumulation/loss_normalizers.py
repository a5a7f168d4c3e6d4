"""Loss normalizers: what a loss divides by, which is the weight of a call among those gathered into one step.

With loss L_c = S_c / N_c of call c, the loss of all rows is L = (sum over c of S_c) / (sum over c of N_c), so a call's
gradient counts with N_c / (sum over c of N_c). Input: a logical program and the same job captured for more rows.
Output: the program with the counts N_c among its results, or a `CaptureError` with the line of the value that is
neither a mean nor a sum over rows.

Note [counts that Python reads]: `loss.sum() / mask.sum().item()` divides by a number of the program, which no value of
the program shows to depend on the batch. The job is therefore captured for a larger batch with the values that such a
batch would have: a sum over the rows grows with them, and any other value is another one. What it changes in the
program depends on the batch.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from rankless.compiler.accumulation.batch_dim_analysis import BatchDimAnalysis
from rankless.compiler.accumulation.batch_dim_kinds import (
    DIV_OPS,
    GROWTH_FACTOR,
    MEAN_REDUCTION,
    NLL_OPS,
    VIEW_OPS,
    BatchDimKind,
    BatchIndependent,
    BatchMixed,
    BatchSum,
    Normalizer,
    is_plain_sum,
)
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue, ProgramOutput, is_random_node
from rankless.compiler.tracing.symbolic_sizes import is_symbolic, list_traced_counts
from rankless.errors import CaptureError

aten = torch.ops.aten
MEAN_OPS = (aten.mean.default, aten.mean.dim)


@dataclass(frozen=True)
class LossNormalizerProgram:
    """A program whose last results are counts; `adjustments` holds for each the number added and the minimum."""

    program: LogicalProgram
    adjustments: tuple[tuple[float, float | None], ...]


def add_loss_normalizers(
    program: LogicalProgram,
    capture_with_rows: Callable[[int, Sequence[Any]], LogicalProgram],
    dims: Mapping[int, int],
    *,
    reads: Sequence[Any] = (),
    line: str,
) -> LossNormalizerProgram:
    """Return the program with the loss normalizers among its results; none if the loss is a sum over rows.

    Raises `CaptureError`, with the line, if calls cannot be gathered.

    Args:
        program: The program of the present call.
        capture_with_rows: Captures the same job for k times the rows, with given values of what its Python reads.
        dims: The batch dims of tensor arguments.
        reads: These values in the present call.
        line: The job's line, for errors without a more precise one.
    """
    target_counts = add_target_counts(program)

    def analyze(find_values: Callable[[int], Sequence[Any]]) -> tuple[LogicalProgram, BatchDimAnalysis]:
        def capture(rows: int) -> LogicalProgram:
            captured = capture_with_rows(rows, find_values(rows))
            target_counts.update(add_target_counts(captured))
            return captured

        fewer, more = capture_two_sizes(program, capture, dims, line)
        hashes: dict[fx.Node, str] = {}
        # Counts that are computed in the same way have equal keys.
        return more, BatchDimAnalysis(
            more, fewer, dims, lambda node: hash_computation(target_counts.get(node, node), hashes)
        )

    more, analysis = analyze_reads(analyze, reads)
    normalizers = find_normalizers(get_loss_node(more), analysis, line)
    counts = []
    for normalizer in normalizers:
        counterpart = find_counterpart(normalizer.node, more, program, line)
        if normalizer.is_literal:
            counts.append(add_constant(program.graph, read_row_count(counterpart)))
        else:
            counts.append(target_counts.get(counterpart, counterpart))
    return LossNormalizerProgram(
        append_results(program, counts), tuple((item.offset, item.minimum) for item in normalizers)
    )


def capture_two_sizes(
    program: LogicalProgram, capture_with_rows: Callable[[int], LogicalProgram], dims: Mapping[int, int], line: str
) -> tuple[LogicalProgram, LogicalProgram]:
    """Return the same job captured for some rows, and for GROWTH_FACTOR times as many."""
    varies = any(is_symbolic(size) for node in program.inputs for size in node.meta["val"].shape)
    # Comparing a symbolic size with a number would specialize it.
    fewer, more = capture_with_rows(1) if varies else program, capture_with_rows(GROWTH_FACTOR)
    rows = [
        node.meta["val"].shape[dims[item.index]]
        for node, item in fewer.inputs.items()
        if item.kind == "argument" and item.index in dims
    ]
    if 1 in rows or find_first_difference([*fewer.graph.nodes], [*more.graph.nodes]) is not None:
        # The strides and views of a batch of one row are ambiguous.
        fewer, more = more, capture_with_rows(GROWTH_FACTOR**2)
        differing = find_first_difference([*fewer.graph.nodes], [*more.graph.nodes])
        if differing is not None:
            raise make_size_dependence_error(differing, line)
    return fewer, more


def find_counterpart(node: fx.Node, other: LogicalProgram, program: LogicalProgram, line: str) -> fx.Node:
    """Return the corresponding node in the program for another number of rows: the i-th with its target."""
    ours, theirs = (
        [item for item in list_dependencies(get_loss_node(variant)) if item.target == node.target]
        for variant in (other, program)
    )
    if len(ours) != len(theirs):
        raise make_size_dependence_error(node, line)
    return theirs[ours.index(node)]


def get_loss_node(program: LogicalProgram) -> fx.Node:
    """Return the node that a train job's program minimizes: its first result."""
    return next(node for node, output in program.outputs if output.kind == "result" and output.index == 0)


def list_dependencies(node: fx.Node) -> list[fx.Node]:
    """Return a node and everything it is computed from, in order."""
    dependencies = {node}
    for item in reversed(node.graph.nodes):
        if item in dependencies:
            dependencies.update(item.all_input_nodes)
    return [item for item in node.graph.nodes if item in dependencies]


def find_first_difference(nodes: Sequence[fx.Node], other_nodes: Sequence[fx.Node]) -> fx.Node | None:
    """Return the first node whose counterpart in the other program has another operator, or None."""
    for node, other in zip(nodes, other_nodes, strict=False):
        # The names of inputs do not matter.
        if node.op != other.op or (node.op != "placeholder" and node.target != other.target):
            return node
    if len(nodes) == len(other_nodes):
        return None
    return nodes[min(len(nodes) - 1, len(other_nodes))]


def make_size_dependence_error(differing: fx.Node, line: str) -> CaptureError:
    """Return the error for a program whose constants cannot be separated from numbers of rows."""
    return CaptureError(
        expected="a job with the same program for any number of rows, so that calls can be gathered into a step",
        found=f"{differing.target} for this number of rows only",
        fix="compute with whole tensors instead of a loop over samples, read sizes from the batch instead of "
        "constants, or train without accumulate=",
        where=differing.meta.get("line") or line,
    )


def find_normalizers(objective: fx.Node, analysis: BatchDimAnalysis, line: str) -> list[Normalizer]:
    """Return what the loss is divided by, in program order; empty for a sum over rows.

    Raises `CaptureError` for a loss that cannot be gathered over calls.
    """
    kind = analysis.kinds[objective]
    if isinstance(kind, BatchMixed):
        raise make_accumulation_error(kind.reason, kind.line or line)
    if not isinstance(kind, BatchSum):
        raise make_accumulation_error("a loss that does not depend on the batch", line)
    order = {node: position for position, node in enumerate(objective.graph.nodes)}
    # The order of a set differs between ranks, and all ranks must pick the same of several equal normalizers.
    normalizers = sorted(filter(None, kind.normalizers), key=lambda normalizer: order[normalizer.node])
    if not normalizers:
        if kind.has_constant:
            raise make_accumulation_error(
                "a sum over rows plus a constant term, which would be added once per call", line
            )
        return []
    lines = " and ".join(sorted({str(normalizer.node.meta.get("line", "")) for normalizer in normalizers}))
    if len(normalizers) < len(kind.normalizers):
        raise make_accumulation_error(
            "a sum over rows plus a mean over rows, whose gradients have different weights", lines
        )
    adjustments = {(normalizer.offset, normalizer.minimum) for normalizer in normalizers}
    if len(adjustments) > 1 or (kind.has_constant and adjustments != {(0.0, None)}):
        raise make_accumulation_error("a mean over a clamped or shifted count, plus a term with another count", lines)
    # Counts computed in the same way are one. Different counts must be proportional, which every call checks.
    alike: dict[fx.Node | str, Normalizer] = {}
    for normalizer in normalizers:
        alike.setdefault(normalizer.node if normalizer.is_literal else normalizer.key, normalizer)
    return list(alike.values())


def make_accumulation_error(found: str, line: str) -> CaptureError:
    """Return the error for a loss that cannot be gathered over calls."""
    return CaptureError(
        expected="a loss that is a mean or a sum over the rows of the batch, so that the gradients of several calls "
        "combine to that of one call on all their rows (accumulate=)",
        found=found,
        fix="write the loss as one mean over rows (or over valid targets), or remove accumulate= and pass the whole "
        "batch in one call",
        where=line,
    )


def read_row_count(node: fx.Node) -> Any:
    """Return the number of rows in a mean, a division, or a multiplication by an inverse."""
    value: LogicalValue = node.meta["val"]
    first: LogicalValue = node.all_input_nodes[0].meta["val"]
    if node.target in MEAN_OPS:
        return prod(first.shape) // max(prod(value.shape), 1)
    number: Any = node.args[1]
    return number if node.target in DIV_OPS else 1.0 / number


def add_constant(graph: fx.Graph, number: Any) -> fx.Node:
    """Add a number as a value of the program, on the CPU, where it is read."""
    returned = graph.output_node()
    settings: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}
    with graph.inserting_before(returned):
        constant = graph.call_function(aten.full.default, ([], 0), settings)
    constant.args = ([], number)  # PyTorch warns of a size given to `call_function`
    constant.meta.update(line="", val=LogicalValue((), (), torch.float64, torch.device("cpu")))
    return constant


def append_results(program: LogicalProgram, nodes: list[fx.Node]) -> LogicalProgram:
    """Return the program with further results."""
    results = sum(output.kind == "result" for _, output in program.outputs)
    added = [
        (node, ProgramOutput(kind="result", name=f"count {position}", index=results + position))
        for position, node in enumerate(nodes)
    ]
    outputs = (*program.outputs, *added)
    returned = program.graph.output_node()
    returned.args = (tuple(node for node, _ in outputs),)
    return replace(program, outputs=outputs)


def keep_last_results(program: LogicalProgram, count: int) -> LogicalProgram:
    """Return a program of its checks, its last `count` results and their dependencies; this consumes the program."""
    checks = [item for item in program.outputs if item[1].kind == "check"]
    outputs = (*checks, *program.outputs[len(program.outputs) - count :])
    returned = program.graph.output_node()
    returned.args = (tuple(node for node, _ in outputs),)
    needed = find_needed(program.graph, returned)
    for node in reversed(list(program.graph.nodes)):
        if node not in needed:
            program.graph.erase_node(node)
    kept = set(program.graph.nodes)
    return replace(
        program, outputs=outputs, inputs={node: given for node, given in program.inputs.items() if node in kept}
    )


def find_needed(graph: fx.Graph, returned: fx.Node) -> set[fx.Node]:
    """Return a node and all that it follows from: values, and those whose sizes are counts of selected rows in them.

    If it follows from a random value, all are needed, because each is drawn after the others.
    """
    first: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        for count in list_counts_in(node.meta.get("val")):
            first.setdefault(count, node)
    needed, stack = set[fx.Node](), [returned]
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        stack += [*node.all_input_nodes, *(first[count] for count in list_counts_in((node.args, node.kwargs)))]
        if is_random_node(node):
            stack += filter(is_random_node, graph.nodes)
    return needed


def list_counts_in(value: Any) -> list[Any]:
    """Return the counts of selected rows among the arguments of a call, or in the shapes of its results."""
    counts: list[Any] = []
    shapes = [
        item.shape for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, LogicalValue)
    ]
    fx.node.map_aggregate(shapes or value, lambda item: counts.extend(list_traced_counts(item)))
    return counts


def add_target_counts(program: LogicalProgram) -> dict[fx.Node, fx.Node]:
    """Add to the graph, for each mean negative log likelihood, the number or total weight of its valid targets."""
    target_counts = {}
    for node in list(program.graph.nodes):
        if node.target in NLL_OPS and node.args[3] == MEAN_REDUCTION:
            with program.graph.inserting_after(node):
                writer = TargetCountWriter(program.graph, node)
            _, target, weight, _, ignored = node.args
            target_counts[node] = writer.targets(target, weight, ignored)
    return target_counts


class TargetCountWriter:
    """Adds operators to a graph, after a node and with its line."""

    def __init__(self, graph: fx.Graph, after: fx.Node) -> None:
        self._graph = graph
        self._after = after
        self._line = after.meta.get("line", "")

    def targets(self, target: Any, weight: Any, ignored: Any) -> fx.Node:
        """Add the number of valid targets, or the sum of their weights, as label smoothing does."""
        while target.target in VIEW_OPS and drop_unit_dims(target) == drop_unit_dims(target.all_input_nodes[0]):
            target = target.all_input_nodes[0]
        value: LogicalValue = target.meta["val"]
        flat = (prod(value.shape),)
        is_ignored = self._call(aten.eq.Scalar, (target, ignored), value.shape, torch.bool)
        if weight is None:
            counted = self._call(aten.bitwise_not.default, (is_ignored,), value.shape, torch.bool)
            return self._call(aten.sum.default, (counted,), (), torch.int64)
        dtype = weight.meta["val"].dtype
        valid_targets = self._call(aten.masked_fill.Scalar, (target, is_ignored, 0), value.shape, value.dtype)
        if len(value.shape) != 1:
            valid_targets = self._call(aten.view.default, (valid_targets, list(flat)), flat, value.dtype)
            is_ignored = self._call(aten.view.default, (is_ignored, list(flat)), flat, torch.bool)
        weights = self._call(aten.gather.default, (weight, 0, valid_targets), flat, dtype)
        counted = self._call(aten.masked_fill.Scalar, (weights, is_ignored, 0), flat, dtype)
        return self._call(aten.sum.default, (counted,), (), dtype)

    def _call(self, operator: Any, arguments: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        with self._graph.inserting_after(self._after):
            node = self._graph.call_function(operator, arguments)
        strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        device = arguments[0].meta["val"].device
        node.meta.update(line=self._line, val=LogicalValue(tuple(shape), strides, dtype, device))
        self._after = node
        return node


def drop_unit_dims(node: fx.Node) -> list[int]:
    """Return the sizes of a value without dims of size one."""
    return [size for size in node.meta["val"].shape if size != 1]


def hash_computation(node: fx.Node, hashes: dict[fx.Node, str]) -> str:
    """Return a text that is equal for values computed in the same way from the same inputs."""
    if node not in hashes:
        if node.op != "call_function" or is_random_node(node):
            hashes[node] = node.name
        else:
            args = fx.node.map_arg((node.args, node.kwargs), lambda item: hash_computation(item, hashes))
            hashes[node] = hashlib.sha256(f"{node.target}{args}".encode()).hexdigest()
    return hashes[node]


Analyze = Callable[[Callable[[int], Sequence[Any]]], tuple[LogicalProgram, BatchDimAnalysis]]
"""Captures a job for two numbers of rows and analyzes it, given the values that it reads for k times the rows."""
OTHER = 0.37
"""What is added to a value that is no sum, which no program has as a factor by chance."""


def analyze_reads(analyze: Analyze, reads: Sequence[Any]) -> tuple[LogicalProgram, BatchDimAnalysis]:
    """Return the larger program and its analysis, where values that depend on the batch have grown with it.

    A value that decides about the program, as the length of a loop, stays as it is, unless it is a sum over the rows.
    """
    found = analyze(lambda _: reads)
    program, analysis = found
    kinds = [analysis.kinds[node] for node, output in program.outputs if output.kind == "check"]
    pairs = [(value, kind) for value, kind in zip(reads, kinds, strict=True) if not isinstance(value, bool)]
    if all(isinstance(kind, BatchIndependent) for _, kind in pairs):
        return found

    def change(rows: int, *, others: bool) -> list[Any]:
        return [grow(value, kind, rows, others=others) for value, kind in zip(reads, kinds, strict=True)]

    if not all(is_sum(kind) or isinstance(kind, BatchIndependent) for _, kind in pairs):
        try:
            return analyze(lambda rows: change(rows, others=True))
        except CaptureError:
            pass  # the program needs these values as they are
    return analyze(lambda rows: change(rows, others=False)) if any(is_sum(kind) for _, kind in pairs) else found


def is_sum(kind: BatchDimKind) -> bool:
    """Return whether a value grows as the number of rows does."""
    return isinstance(kind, BatchSum) and is_plain_sum(kind) and not kind.is_shifted


def grow(value: Any, kind: BatchDimKind, rows: int, *, others: bool) -> Any:
    """Return the value that a batch of `rows` times as many rows could have."""
    if isinstance(value, bool) or isinstance(kind, BatchIndependent):
        return value
    if is_sum(kind):
        return value * rows
    steps = 0
    while rows > 1:
        steps, rows = steps + 1, rows // GROWTH_FACTOR
    return value + steps * (1 if isinstance(value, int) else OTHER) if others else value
