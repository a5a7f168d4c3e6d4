"""Values that a job's Python reads of the batch, and that its loss may be computed with.

`loss.sum() / mask.sum().item()` divides by a number of the program, which no value of the program shows to depend on
the batch. The job is therefore captured for a larger batch with the values that such a batch would have: a sum over the
rows grows with them, and any other value is another one. What it changes in the program depends on the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rankless.compiler.analysis.batch_dim_analysis import BatchDimAnalysis
from rankless.compiler.analysis.batch_dim_kinds import (
    GROWTH_FACTOR,
    BatchDimKind,
    BatchIndependent,
    BatchSum,
    is_plain_sum,
)
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.errors import CaptureError

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
