"""Are two runs the same training? Recordings in, a verdict out: `allowance` says how far they may be apart."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rankless.config.run_config import InspectedCall
from rankless.records.job_results import JobCalled, Leaf, StepRecorded
from rankless.verify.differences import RESOLUTION, Difference, Mismatch, RunPosition, measure
from rankless.verify.recordings import Recording, to_array
from rankless.verify.tolerance import NoiseFloor, rounding_limit

NOT_REPEATABLE_FACTOR = 1e3
HIGH_NOISE = 1e-3
"""Noise in the losses, as a part of the largest one, from which on equal within the noise says little."""

Cause = Literal["values", "structure", "ranks", "repetition"]
"""What is not the same: numbers, which rounding may explain; calls, shapes or tensors; ranks of one run among
each other; the one-worker run and its repetition.
"""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Something that is not the same, and where."""

    location: RunPosition
    tensor: str
    expected: str
    found: str
    cause: Cause
    is_of_reference: bool = False
    """Whether it is the plain twin that the script differs from."""
    call: InspectedCall | None = None
    """The job call to look into for the cause; None where numbers are not what parts, or no call made them."""


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One line of the table: all comparisons of one kind, and the one nearest to its limit or furthest beyond."""

    name: str
    compared: int
    largest: float
    noise: float | None
    worst: Difference | None
    worst_allowed: float


@dataclass(frozen=True, kw_only=True)
class ToleranceUse:
    """A tolerance of the user's own beside what was measured; all as parts of each tensor, the largest of all tensors.

    `unmet` is the first tensor in which not even the script on one worker, repeated, stays within it; None also where
    it matters to nobody, since all that was compared is within its limits.
    """

    tolerance: float
    largest: float
    noise: float
    unmet: Difference | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came out: `findings` in the order of the run, none if it is the same training."""

    steps: int
    calls: int
    rows: tuple[TableRow, ...]
    findings: tuple[Divergence, ...]
    losses_one: tuple[float, ...]
    losses_many: tuple[float, ...]
    largest_loss_difference: float
    largest_parameter_difference: float
    loss_noise: float
    parameter_noise: float
    precision: str
    """The coarsest dtype of all that was compared, as "float32"; empty if there were whole numbers only."""
    stopped: bool
    """Whether the runs were ended before the script was."""
    tolerance: ToleranceUse | None
    all_rounding: tuple[str, ...]
    """Parameters whose gradients are all rounding: in effect they are not compared."""

    @property
    def needs_float64(self) -> bool:
        """Whether finer arithmetic should decide: numbers part, which it may bring together, or noise hides much."""
        if self.tolerance is not None or RESOLUTION.get(self.precision, 0.0) <= RESOLUTION["float64"]:
            return False
        if not self.findings:
            largest = max((abs(loss) for loss in self.losses_one if math.isfinite(loss)), default=0.0)
            return self.loss_noise > HIGH_NOISE * largest
        # Other calls or shapes may follow from numbers that have parted before; ranks that disagree do not.
        causes = {finding.cause for finding in self.findings}
        return self.findings[0].cause == "values" and causes <= {"values", "structure"}


def compare(
    one: Recording, many: Sequence[Recording], noise: Sequence[Recording], *, tolerance: float | None = None
) -> Comparison:
    """What sets `many`, all ranks of a run, apart from `one`, the run on one worker; `noise` repeats that."""
    findings: list[Divergence] = []
    noise_differences = []
    for repetition in noise:
        differences, mismatch = measure(one, repetition)
        noise_differences.append(differences)
        findings += _check_repeatable(differences, mismatch)
    noise_floor = NoiseFloor(noise_differences, tolerance=tolerance)
    against_one = []
    for recording in many:
        differences, mismatch = measure(one, recording)
        against_one.append(differences)
        findings += _check_limits(differences, mismatch, noise_floor, f"rank {recording.rank}")
    among = []
    for recording in many[1:]:
        differences, mismatch = measure(many[0], recording)
        among.append(differences)
        findings += _check_ranks_agree(differences, mismatch, recording.rank)
    findings.sort(key=lambda finding: finding.location.position)
    findings = [replace(finding, call=_find_call(finding, one)) for finding in findings]
    flat = [item for differences in against_one for item in differences]
    losses_one, losses_many = extract_losses(one), extract_losses(many[0]) if many else ()
    return Comparison(
        steps=one.steps,
        calls=sum(isinstance(result, JobCalled) for result in one.results),
        rows=(
            *_make_rows(flat, noise_floor),
            _make_agreement_row([item for differences in among for item in differences]),
        ),
        findings=tuple(findings),
        losses_one=losses_one,
        losses_many=losses_many,
        largest_loss_difference=max(
            (_find_largest_gap(losses_one, extract_losses(rank)) for rank in many), default=0.0
        ),
        largest_parameter_difference=_find_largest_parameter(one, against_one),
        loss_noise=max((_find_largest_gap(losses_one, extract_losses(run)) for run in noise), default=0.0),
        parameter_noise=_find_largest_parameter(one, noise_differences),
        precision=max((item.dtype for item in flat), key=lambda dtype: RESOLUTION.get(dtype, 0.0), default=""),
        stopped=one.stopped,
        tolerance=None
        if tolerance is None
        else _measure_tolerance_use(tolerance, noise_floor, flat, noise_differences),
        all_rounding=noise_floor.all_rounding,
    )


def _measure_tolerance_use(
    tolerance: float, noise_floor: NoiseFloor, found: Sequence[Difference], noise: Sequence[Sequence[Difference]]
) -> ToleranceUse:
    repeated = [item for differences in noise for item in differences]
    unmet = next((item for item in repeated if not item.size <= noise_floor.limit(item)), None)
    if unmet is None and not all(item.size <= noise_floor.limit(item) for item in found):
        # Rounding is allowed, and a lone loss may by chance be no other in the repetition.
        unmet = next((item for item in repeated if noise_floor.relative(item) > tolerance), None)
    return ToleranceUse(
        tolerance=tolerance,
        largest=max(map(noise_floor.relative, found), default=0.0),
        noise=max(map(noise_floor.relative, repeated), default=0.0),
        unmet=unmet,
    )


def _find_call(finding: Divergence, one: Recording) -> InspectedCall | None:
    """The job call in which, or after which, numbers part."""
    if finding.cause not in ("values", "ranks") or finding.location.position >= len(one.results):
        return None
    before = (
        result for result in reversed(one.results[: finding.location.position + 1]) if isinstance(result, JobCalled)
    )
    called = next(before, None)
    return None if called is None else InspectedCall(job=called.job, call=called.call)


def extract_losses(recording: Recording) -> tuple[float, ...]:
    """The loss of every training call: its result, its "loss", or its first float; the mean if it has many."""
    found = []
    for call, step in zip(recording.results, recording.results[1:], strict=False):
        if isinstance(call, JobCalled) and isinstance(step, StepRecorded):
            leaf = find_loss_leaf(call)
            if leaf is not None:
                values = to_array(leaf)
                found.append(float(values.mean()) if values.size else math.nan)
    return tuple(found)


def find_loss_leaf(call: JobCalled) -> Leaf | None:
    """The loss among a training call's results; None if it has no floats."""
    floats = [leaf for leaf in call.leaves if not leaf.is_integer]
    named = [leaf for leaf in floats if leaf.path in ("", "['loss']")]
    return next(iter(named or floats), None)


def _find_largest_gap(first: Sequence[float], second: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(first, second, strict=False) if a != b), default=0.0)


def _find_largest_parameter(one: Recording, runs: Sequence[Sequence[Difference]]) -> float:
    parameters = {final.name for final in one.described if final.is_parameter}
    sizes = [
        item.size for differences in runs for item in differences if item.kind == "final" and item.tensor in parameters
    ]
    return max(sizes, default=0.0)


def _check_repeatable(differences: Sequence[Difference], mismatch: Mismatch | None) -> Iterator[Divergence]:
    first = next((item.location.position for item in differences if item.kind == "gradient"), math.inf)
    for item in differences:
        limit = NOT_REPEATABLE_FACTOR * rounding_limit(item)
        if item.location.position < first and not item.is_integer_result and item.size > limit:
            expected = (
                "the run on one worker, repeated, to begin alike "
                "(seed what the script draws from; read no file that an earlier run has left)"
            )
            yield Divergence(
                location=item.location,
                tensor=item.tensor,
                expected=expected,
                found=f"they differ by {item.size:.3g}",
                cause="repetition",
            )
            return
    if mismatch is not None:
        yield _make_divergence(mismatch, "the run on one worker, repeated", cause="repetition")


def _check_limits(
    differences: Sequence[Difference], mismatch: Mismatch | None, noise_floor: NoiseFloor, who: str
) -> Iterator[Divergence]:
    """The first difference that is not allowed, and the mismatch."""
    for item in differences:
        limit = noise_floor.limit(item)
        if not item.size <= limit:
            bound = "" if noise_floor.tolerance is None else f"tolerance {noise_floor.tolerance:g}, "
            expected = f"at most {limit:.3g} from the run on one worker ({bound}noise {noise_floor.noise(item):.3g})"
            found = f"{item.size:.3g} on {who}"
            yield Divergence(location=item.location, tensor=item.tensor, expected=expected, found=found, cause="values")
            break
    if mismatch is not None:
        yield _make_divergence(mismatch, who, cause="structure")


def _check_ranks_agree(differences: Sequence[Difference], mismatch: Mismatch | None, rank: int) -> Iterator[Divergence]:
    for item in differences:
        if not item.size <= rounding_limit(item):
            expected = f"rank {rank} to agree with rank 0, within {rounding_limit(item):.3g}"
            found = f"{item.size:.3g}"
            yield Divergence(location=item.location, tensor=item.tensor, expected=expected, found=found, cause="ranks")
            break
    if mismatch is not None:
        yield _make_divergence(mismatch, f"rank {rank}, beside rank 0", cause="ranks")


def _make_divergence(mismatch: Mismatch, who: str, *, cause: Cause) -> Divergence:
    return Divergence(
        location=mismatch.location,
        tensor=mismatch.tensor,
        expected=mismatch.expected,
        found=f"{mismatch.found}, on {who}" if who.startswith("rank") else f"{mismatch.found}, in {who}",
        cause=cause,
    )


def _make_rows(differences: Sequence[Difference], noise_floor: NoiseFloor) -> Iterator[TableRow]:
    names = {
        "losses and other results": ("result", False),
        "whole-number results": ("result", True),
        "gradients, each step": ("gradient", False),
        "parameters and buffers, each step": ("parameter", False),
        "parameters and buffers, final": ("final", False),
    }
    for name, sort in names.items():
        yield make_row(name, [item for item in differences if (item.kind, item.is_integer_result) == sort], noise_floor)


def make_row(name: str, items: Sequence[Difference], noise_floor: NoiseFloor) -> TableRow:
    """The line of the table on some differences."""
    worst, limit = _find_nearest(items, [noise_floor.limit(item) for item in items])
    return TableRow(
        name=name,
        compared=len(items),
        largest=max((item.size for item in items), default=0.0),
        noise=max((noise_floor.noise(item) for item in items), default=0.0),
        worst=worst,
        worst_allowed=limit,
    )


def _make_agreement_row(items: Sequence[Difference]) -> TableRow:
    worst, limit = _find_nearest(items, [rounding_limit(item) for item in items])
    largest = max((item.size for item in items), default=0.0)
    return TableRow(
        name="ranks among each other",
        compared=len(items),
        largest=largest,
        noise=None,
        worst=worst,
        worst_allowed=limit,
    )


def _find_nearest(items: Sequence[Difference], limits: Sequence[float]) -> tuple[Difference | None, float]:
    """The difference that came nearest to its limit, or went furthest beyond it."""
    ratios = [
        item.size / limit if limit > 0 else (math.inf if item.size > 0 else 0.0)
        for item, limit in zip(items, limits, strict=True)
    ]
    if not ratios:
        return None, 0.0
    index = max(range(len(ratios)), key=ratios.__getitem__)
    return items[index], limits[index]
