"""Render a decision for people and programs: a verdict of two short lines, what follows from it, and a JSON report."""

import os
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rankless.verify.causes import Cause
from rankless.verify.differences_beyond_tolerance import Comparison, Divergence, TableLine, Tolerance
from rankless.verify.first_differing_value import FirstDifferingValue, render_first_value
from rankless.verify.run_and_decide import Decision, Outcome

EXIT_CODES: Mapping[Outcome, int] = {"same": 0, "different": 1, "undecided": 3}
"""The exit codes of `rankless verify`; 2 is an invalid command line, 130 an interrupt."""


class FirstDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The location where two trainings diverge."""

    step: int
    tensor: str
    line: str
    expected: str
    found: str


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one comparison. A number that is not finite becomes null."""

    decided_in: str = ""
    """The precision of the compared runs, as "float64"."""
    steps: int = 0
    noise_steps: int = 0
    """From how many of these steps the noise floor is."""
    calls: int = 0
    largest_loss_difference: float | None = None
    largest_parameter_difference: float | None = None
    noise_floor: dict[str, float | None] = msgspec.field(default_factory=lambda: {"loss": None, "parameter": None})
    """For "loss" and "parameter": the largest difference of the perturbed run on one worker."""
    first_difference: FirstDifference | None = None
    losses_one: tuple[float, ...] = ()
    losses_many: tuple[float, ...] = ()
    stopped: bool = False
    """Whether the runs were stopped after `steps`, before the script ended."""
    tolerance: Tolerance | None = None
    """The user's bound, which then replaces the measured one."""
    table: tuple[TableLine, ...] = ()


class VerifyReport(Figures, frozen=True, kw_only=True):
    """The result of `rankless verify`: the verdict, what to do next, and the numbers that decided."""

    verdict: Outcome
    """"same", "different", or "undecided": it could not be decided, or a run failed."""
    same: bool
    """Whether the verdict is "same"."""
    exit_code: int
    text: str
    """The verdict as it is printed."""
    next_step: str
    """What to do next; empty if nothing is."""
    workers: int
    failure: str | None = None
    """Why nothing was decided."""
    own_precision: Figures | None = None
    """The comparison in the script's own precision, if float64 was asked to decide."""
    float64_failure: str | None = None
    """Why float64 could not decide, if it was tried."""
    against: str | None = None
    """The plain reference script that the runs were compared with, too."""
    first_value: FirstDifferingValue | None = None
    """The first value that differs, in the job call where the runs diverge; null if not searched or not found."""
    logical: bool = False
    """Whether several workers ran the script in the logical view: it knows no ranks, and its batches were divided."""
    cause: Cause | None = None
    """Why a script that divides its own data, as one of DDP, trains otherwise on several ranks."""
    not_covered: tuple[str, ...] = ()
    """What the comparison did not cover."""


def make_report(decision: Decision, *, workers: int) -> VerifyReport:
    """Return the report on a decision."""
    comparison = decision.comparison
    figures = Figures() if comparison is None else make_figures(comparison)
    own = decision.own_comparison
    return VerifyReport(
        **msgspec.structs.asdict(figures),
        verdict=decision.outcome,
        same=decision.outcome == "same",
        exit_code=EXIT_CODES[decision.outcome],
        text="\n".join(render_verdict(decision, workers=workers)),
        next_step=decision.next_step,
        workers=workers,
        failure=decision.reason or None,
        own_precision=None if own is None else make_figures(own),
        float64_failure=decision.float64_failure,
        against=decision.reference,
        first_value=decision.first_value,
        logical=decision.is_logical,
        cause=decision.cause,
        not_covered=decision.not_covered,
    )


def make_figures(comparison: Comparison) -> Figures:
    """Return the numbers of a comparison."""
    first = comparison.findings[0] if comparison.findings else None
    return Figures(
        decided_in=comparison.precision,
        steps=comparison.steps,
        noise_steps=comparison.noise_steps,
        calls=comparison.calls,
        largest_loss_difference=comparison.largest_loss_difference,
        largest_parameter_difference=comparison.largest_parameter_difference,
        noise_floor={"loss": comparison.loss_noise, "parameter": comparison.parameter_noise},
        first_difference=None if first is None else _make_first_difference(first),
        losses_one=comparison.losses_one,
        losses_many=comparison.losses_many,
        stopped=comparison.stopped,
        tolerance=comparison.tolerance,
        table=comparison.rows,
    )


def render_verdict(decision: Decision, *, workers: int) -> list[str]:
    """Return the verdict in one or two lines."""
    match decision.outcome:
        case "same":
            return _render_same(decision, workers)
        case "different":
            return _render_different(decision)
    return [f"could not be decided: {decision.reason}"]


def render_details(decision: Decision, *, verbose: bool) -> Iterator[str]:
    """Yield what follows the verdict: the cause, what to do, the table, and what was not covered.

    `verbose` adds the table of the script's own precision if float64 decided, and all further differences.
    """
    if decision.cause is not None and decision.outcome == "different":
        yield f"cause: {decision.cause.name}: {decision.cause.text}"
    if decision.first_value is not None:
        yield render_first_value(decision.first_value)
    if decision.next_step:
        yield f"next: {decision.next_step}"
    comparison, own = decision.comparison, decision.own_comparison
    if verbose and own is not None:
        stop = f", the first {_count(own.steps, 'step')}" if own.stopped else ""
        yield f"\nin {own.precision}{stop}:\n{render_table(own.rows)}"
    if comparison is not None:
        title = f"\nin {comparison.precision}:\n" if own is not None else "\n"
        yield f"{title}{render_table(comparison.rows)}"
        if comparison.noise_steps < comparison.steps:
            yield f"noise floor: from the first {comparison.noise_steps} of {comparison.steps} steps"
    if comparison is not None and comparison.tolerance is not None:
        yield render_tolerance(comparison.tolerance)
    if comparison is not None and verbose:
        yield from _render_findings(comparison.findings[1:])
    if decision.not_covered:
        yield render_coverage(decision.not_covered)


def render_tolerance(tolerance: Tolerance) -> str:
    """Describe the user's bound beside the noise floor, in a line or two."""
    line = (
        f"tolerance {tolerance.tolerance:g} of each tensor: the largest difference is "
        f"{tolerance.largest_difference:.2g}, the noise floor {tolerance.noise_floor:.2g}"
    )
    if tolerance.unmet is None:
        return line
    return (
        f"{line};\nnot even the script on one worker, with its last bits perturbed, stays within it ({tolerance.unmet})"
    )


def render_coverage(not_covered: Sequence[str]) -> str:
    """Describe what the comparison did not cover, a line for each kind."""
    return "\n".join(["not covered:", *(f"  - {text}" for text in not_covered)])


def _render_same(decision: Decision, workers: int) -> list[str]:
    comparison = decision.comparison
    assert comparison is not None
    stop = f", as in {decision.reference}" if decision.reference is not None else ""
    stop += f" (stopped after {_count(comparison.steps, 'step')})" if comparison.stopped else ""
    calls = "" if decision.is_foreign else f" and {_count(comparison.calls, 'job call')}"
    view = " in the logical view" if decision.is_logical else ""
    first = (
        f"same training: {_count(comparison.steps, 'step')}{calls} on 1 and on {_count(workers, 'worker')}{view}{stop}"
    )
    second = (
        f"losses within {comparison.largest_loss_difference:.2g} (noise {comparison.loss_noise:.2g}), "
        f"final parameters within {comparison.largest_parameter_difference:.2g} "
        f"(noise {comparison.parameter_noise:.2g})"
    )
    if comparison.tolerance is not None:
        second += f", tolerance {comparison.tolerance.tolerance:g}"
    return [first, f"{second}{_describe_precision(decision)}"]


def _render_different(decision: Decision) -> list[str]:
    finding = decision.finding
    assert finding is not None
    where = f" ({os.path.basename(finding.location.line)})" if finding.location.line else ""
    return [
        f"NOT the same training: first at step {finding.location.step}, {finding.tensor}{where}",
        f"expected {finding.expected}, found {finding.found}{_describe_precision(decision)}",
    ]


def _describe_precision(decision: Decision) -> str:
    """Describe which runs decided if there were several, with a leading separator."""
    if decision.float64_failure is not None:
        return f"; float64 could not decide: {decision.float64_failure}"
    return "; decided in float64" if decision.own_comparison is not None else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _render_findings(findings: Sequence[Divergence]) -> Iterator[str]:
    if findings:
        yield "further differences:"
    for finding in findings:
        where = f"step {finding.location.step}, {finding.tensor}"
        yield f"  - {where}: expected {finding.expected}, found {finding.found}"


def _make_first_difference(finding: Divergence) -> FirstDifference:
    return FirstDifference(
        step=finding.location.step,
        tensor=finding.tensor,
        line=finding.location.line,
        expected=finding.expected,
        found=finding.found,
    )


HEADERS = ("compared", "number", "largest difference", "noise floor", "nearest to its limit")


def render_table(rows: Sequence[TableLine]) -> str:
    """Return the table of comparisons, in columns."""
    lines = [HEADERS, *(_make_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADERS))]
    rendered = []
    for name, *numbers, nearest in lines:
        middle = "  ".join(cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True))
        rendered.append(f"{name.ljust(widths[0])}  {middle}  {nearest}".rstrip())
    return "\n".join(rendered)


def _make_cells(row: TableLine) -> tuple[str, ...]:
    noise = "" if row.noise_floor is None else f"{row.noise_floor:.2g}"
    return (row.name, f"{row.compared:,}", f"{row.largest_difference:.2g}", noise, _format_nearest(row))


def _format_nearest(row: TableLine) -> str:
    if row.nearest is None:
        return "all equal" if row.compared else "nothing to compare"
    return f"{row.nearest}: {row.nearest_difference:.2g} of {row.nearest_limit:.2g}"
