"""Render a comparison for people and programs: a table with a verdict line, and a JSON report."""

import math
import os
from collections.abc import Sequence

import msgspec

from rankless.verify.comparison import Comparison, Divergence, TableRow, ToleranceUse
from rankless.verify.first_difference import FirstDifferingValue

HEADERS = ("compared", "number", "largest difference", "noise floor", "nearest to its limit")


class FirstDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The location where two trainings diverge."""

    step: int
    tensor: str
    line: str
    expected: str
    found: str


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """A user's bound and the measured differences, relative to the tensor; each is the largest of all tensors."""

    tolerance: float
    largest_difference: float
    noise_floor: float
    unmet: str | None
    """The first tensor that exceeds the tolerance even in the repeated run on one worker."""


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The file that `rankless verify --json` writes. A number that is not finite becomes null."""

    same: bool
    workers: int
    steps: int
    calls: int
    largest_loss_difference: float
    largest_parameter_difference: float
    noise_floor: dict[str, float]
    """For "loss" and "parameter": the largest difference of the perturbed run on one worker."""
    first_difference: FirstDifference | None
    losses_one: tuple[float, ...]
    losses_many: tuple[float, ...]
    failure: str | None = None
    """Why the runs could not be compared."""
    decided_in: str = ""
    """The precision of the runs that the figures above belong to, as "float64"."""
    own_precision: "VerifyReport | None" = None
    """The report on the script's own precision, if float64 decided instead."""
    float64_failure: str | None = None
    """Why float64 could not decide, if it was tried."""
    stopped: bool = False
    """Whether the runs were stopped after `steps`, before the script ended."""
    tolerance: Tolerance | None = None
    """The user's bound, which then replaces the measured one."""
    against: str | None = None
    """The plain reference script that the runs were compared with, too."""
    first_value: FirstDifferingValue | None = None
    """The first value that differs, in the job call where the runs diverge; None if not searched or not found."""
    not_covered: tuple[str, ...] = ()
    """What the comparison did not cover."""


def make_failed_report(failure: str, *, workers: int) -> VerifyReport:
    """Return the report on runs that could not be compared."""
    return VerifyReport(
        same=False,
        workers=workers,
        steps=0,
        calls=0,
        largest_loss_difference=math.nan,
        largest_parameter_difference=math.nan,
        noise_floor={"loss": math.nan, "parameter": math.nan},
        first_difference=None,
        losses_one=(),
        losses_many=(),
        failure=failure,
    )


def make_report(comparison: Comparison, *, workers: int) -> VerifyReport:
    """Return the report on a comparison: the same training if there is no finding."""
    first = comparison.findings[0] if comparison.findings else None
    return VerifyReport(
        same=first is None,
        workers=workers,
        steps=comparison.steps,
        calls=comparison.calls,
        largest_loss_difference=comparison.largest_loss_difference,
        largest_parameter_difference=comparison.largest_parameter_difference,
        noise_floor={"loss": comparison.loss_noise, "parameter": comparison.parameter_noise},
        first_difference=None if first is None else _make_first_difference(first),
        losses_one=comparison.losses_one,
        losses_many=comparison.losses_many,
        decided_in=comparison.precision,
        stopped=comparison.stopped,
        tolerance=None if comparison.tolerance is None else _make_tolerance(comparison.tolerance),
    )


def _make_tolerance(use: ToleranceUse) -> Tolerance:
    unmet = use.unmet
    return Tolerance(
        tolerance=use.tolerance,
        largest_difference=use.largest,
        noise_floor=use.noise,
        unmet=None if unmet is None else f"{unmet.tensor}, step {unmet.location.step}",
    )


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
    """Describe what the comparison did not cover, a line for each kind; empty if it covered everything."""
    return "\n".join(["not covered:", *(f"  - {text}" for text in not_covered)]) if not_covered else ""


def render_table(comparison: Comparison) -> str:
    """Return the table of comparisons, in columns."""
    lines = [HEADERS, *(_make_cells(row) for row in comparison.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADERS))]
    rendered = []
    for name, *numbers, nearest in lines:
        middle = "  ".join(cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True))
        rendered.append(f"{name.ljust(widths[0])}  {middle}  {nearest}".rstrip())
    return "\n".join(rendered)


def render_verdict(report: VerifyReport) -> str:
    """Return one line that begins with "same training:" or "NOT the same training:"."""
    workers = f"{report.workers} worker{'s' if report.workers != 1 else ''}"
    if report.failure is not None:
        return f"NOT the same training: {report.failure}"
    first = report.first_difference
    if first is not None:
        return (
            f"NOT the same training: first at {_describe_location(first)}: "
            f"expected {first.expected}, found {first.found}"
            f"{_describe_decision(report)}"
        )
    return (
        f"same training: {report.steps} steps and {report.calls} job calls on 1 and on {workers}; "
        f"losses within {report.largest_loss_difference:.2g} (noise {report.noise_floor['loss']:.2g}), "
        f"final parameters within {report.largest_parameter_difference:.2g} "
        f"(noise {report.noise_floor['parameter']:.2g}){_describe_stop(report)}{_describe_decision(report)}"
    )


def _describe_location(first: FirstDifference) -> str:
    """Describe where two trainings diverge, as "step 2, result of train (train.py:14)"."""
    where = f" ({os.path.basename(first.line)})" if first.line else ""
    return f"step {first.step}, {first.tensor}{where}"


def render_doubt(own: VerifyReport) -> str:
    """Describe why the runs in the script's own precision do not suffice."""
    first = own.first_difference
    if first is None:
        return f"in {own.decided_in} noise of {own.noise_floor['loss']:.2g} in the losses could hide faults"
    return f"in {own.decided_in} the runs diverge at {_describe_location(first)}"


def _describe_stop(report: VerifyReport) -> str:
    """Describe where the runs were stopped and which bound applied, with a leading space."""
    stop = f", and as in {report.against}" if report.against is not None else ""
    stop += f" (stopped after {report.steps} step{'s' if report.steps != 1 else ''})" if report.stopped else ""
    return stop + (f" (within the tolerance {report.tolerance.tolerance:g})" if report.tolerance is not None else "")


def _describe_decision(report: VerifyReport) -> str:
    """Describe which runs decided if there were several, with a leading space."""
    if report.float64_failure is not None:
        return f" ({render_doubt(report)}; float64 could not decide: {report.float64_failure})"
    own = report.own_precision
    if own is None:
        return ""
    rounding = ", by rounding, which can turn over a max-pool, ReLU or argmax"
    why = rounding if report.same and own.first_difference is not None else ""
    return f" (decided in float64: {render_doubt(own)}{why})"


def encode_report(report: VerifyReport) -> bytes:
    """Return the report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def _make_first_difference(finding: Divergence) -> FirstDifference:
    return FirstDifference(
        step=finding.location.step,
        tensor=finding.tensor,
        line=finding.location.line,
        expected=finding.expected,
        found=finding.found,
    )


def _make_cells(row: TableRow) -> tuple[str, ...]:
    noise = "" if row.noise is None else f"{row.noise:.2g}"
    return (row.name, f"{row.compared:,}", f"{row.largest:.2g}", noise, _format_nearest(row))


def _format_nearest(row: TableRow) -> str:
    worst = row.worst
    if worst is None or worst.size == 0:
        return "all equal" if row.compared else "nothing to compare"
    return f"{worst.tensor}, step {worst.location.step}: {worst.size:.2g} of {row.worst_allowed:.2g}"
