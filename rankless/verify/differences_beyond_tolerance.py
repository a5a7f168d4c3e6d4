"""Decide whether two runs are the same training. `noise_floor` limits how far correct runs may differ.

Find where a comparison can no longer tell a fault from rounding.

Note [limits that hide faults]: the limit of a difference follows the noise, and noise grows as training amplifies
rounding. A limit that is a large part of what it limits passes any fault. A fault that the runs on one worker share
shows as noise too. So a comparison is decisive only as long as its limits are small:
  - for a result: 1 % of the largest value that this result has had;
  - for a gradient: 10 % of its norm;
  - for a parameter or buffer: 10 % of the length of its path, or 1 % of its norm if it has not moved.
A limit that rounding alone explains is never too high. In float64 neither is that of a difference which is itself one
of rounding: it hides nothing, whatever the noise. Parameters whose gradients are all rounding are left out. If those
are most of what trains, nothing is decided.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from rankless.config.run_config import InspectedCall
from rankless.records.verify_recording_format import JobCalled, Leaf, StepRecorded
from rankless.verify.differences import RESOLUTION, Difference, Mismatch, RunPosition, measure
from rankless.verify.noise_floor import NoiseFloor, compute_rounding_limit
from rankless.verify.read_and_combine_recordings import Recording, take_beginning, to_array

NOT_REPEATABLE_FACTOR = 1e3
GROSS_FACTOR = 100.0
GROSS_SHARE = 0.05

Cause = Literal["values", "structure", "ranks", "repetition", "branch"]
"""The kind of divergence.

"values" are numbers, which rounding may explain. "structure" means other calls, shapes or tensors. "ranks" disagree
within one run. "repetition" means that the one-worker run does not repeat itself. "branch" means that it does until its
numbers differ by rounding, and then makes other calls: the script decides by numbers that rounding changes.
"""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A difference beyond the limits, and its location."""

    location: RunPosition
    tensor: str
    expected: str
    found: str
    cause: Cause
    is_of_reference: bool = False
    """Whether the script differs from the plain reference script, not from its own run on one worker."""
    is_gross: bool = False
    """Whether rounding explains it in no precision."""
    excess: float = math.inf
    """How many times its limit a number exceeds."""
    call: InspectedCall | None = None
    """The job call to inspect for the cause; None if numbers do not differ, or no call computed them."""


class TableLine(msgspec.Struct, frozen=True, kw_only=True):
    """All comparisons of one kind, and the one nearest to its limit or furthest beyond it."""

    name: str
    compared: int
    largest_difference: float
    noise_floor: float | None
    nearest: str | None
    """The tensor and the step of the comparison nearest to its limit; null if all are equal."""
    nearest_difference: float | None
    nearest_limit: float | None


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """A user's bound and the measured differences, relative to the tensor; each is the largest of all tensors."""

    tolerance: float
    largest_difference: float
    noise_floor: float
    unmet: str | None
    """The first tensor that exceeds the tolerance even in the repeated run on one worker."""


RESULT_SHARE = 0.01
GRADIENT_SHARE = 0.1
PATH_SHARE = 0.1
STILL_SHARE = 0.01
SMALLEST_SHARE = 1e-6
"""Results and gradients below this fraction of the largest of their kind count as that fraction."""
MOST_ROUNDING = 0.5
"""The fraction of the trained elements from which on too many gradients are all rounding."""


@dataclass(frozen=True, kw_only=True)
class TooNoisy:
    """The first tensor whose limit is too high to find a fault."""

    step: int
    position: int
    tensor: str
    noise: float
    scale: float
    """What the noise is large beside: the value of a result, the norm of a gradient, the path of a parameter."""

    @property
    def reason(self) -> str:
        """Why nothing can be decided from here on, in one clause."""
        return (
            f"at step {self.step} the noise in {self.tensor} ({self.noise:.2g} of {self.scale:.2g}) could hide faults"
        )


def find_too_noisy(differences: Sequence[Difference], noise_floor: NoiseFloor) -> TooNoisy | None:
    """Return the first difference whose limit could hide a fault, in the order of the run."""
    largest_results: dict[str, float] = {}
    largest = 0.0
    for item in sorted(differences, key=lambda item: item.location.position):
        if item.is_integer_result or item.dtype == "text":
            continue
        if item.kind == "result":
            largest = max(largest, item.scale)
            largest_results[item.tensor] = max(largest_results.get(item.tensor, 0.0), item.scale)
            scale = max(largest_results[item.tensor], SMALLEST_SHARE * largest)
            highest = RESULT_SHARE * scale
        elif item.kind == "gradient":
            scale = max(item.scale, SMALLEST_SHARE * item.largest)
            highest = GRADIENT_SHARE * scale
        else:
            scale = item.path if item.path > 0 else item.scale
            highest = PATH_SHARE * item.path if item.path > 0 else STILL_SHARE * item.scale
        if noise_floor.is_all_rounding(item) or is_exact(item):
            continue
        if noise_floor.limit(item) > max(highest, compute_rounding_limit(item)):
            return TooNoisy(
                step=item.location.step,
                position=item.location.position,
                tensor=item.tensor,
                noise=noise_floor.noise(item),
                scale=scale,
            )
    return None


def is_exact(item: Difference) -> bool:
    """Whether a difference is one of rounding, by a bound so small that no noise matters."""
    return item.dtype in ("float64", "complex128") and item.size <= compute_rounding_limit(item)


def is_mostly_rounding(differences: Sequence[Difference], noise_floor: NoiseFloor) -> bool:
    """Whether the gradients of most trained elements are all rounding, so that little was compared."""
    gradients = {item.tensor: item.count for item in differences if item.kind == "gradient" and item.largest > 0}
    rounding = {f"gradient of {name}" for name in noise_floor.all_rounding}
    lost = sum(count for tensor, count in gradients.items() if tensor in rounding)
    return lost > MOST_ROUNDING * sum(gradients.values())


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison. `findings` follow the order of the run; without any the training is the same."""

    steps: int
    calls: int
    rows: tuple[TableLine, ...]
    findings: tuple[Divergence, ...]
    losses_one: tuple[float, ...]
    losses_many: tuple[float, ...]
    largest_loss_difference: float
    largest_parameter_difference: float
    loss_noise: float
    parameter_noise: float
    precision: str
    """The coarsest dtype of all compared tensors, as "float32"; empty if all are integers."""
    stopped: bool
    """Whether the runs were stopped before the script ended."""
    noise_steps: int
    """From how many steps the noise floor is; fewer than `steps` if the perturbed runs were stopped earlier."""
    tolerance: Tolerance | None
    all_rounding: tuple[str, ...]
    """Parameters whose gradients consist of rounding errors only, so the comparison says nothing about them."""
    too_noisy: TooNoisy | None
    """Where the first limit is so high that it could hide a fault; None with a user's tolerance."""
    is_mostly_rounding: bool
    """Whether the gradients of most of what trains are all rounding."""
    relies_on_paths: bool
    """Whether parameters differ by more than the noise, and passed because their gradients are all rounding."""

    @property
    def needs_float64(self) -> bool:
        """Whether a run in float64 should decide.

        It should if numbers differ, which rounding may explain, or if noise is high enough to hide faults.
        """
        if self.tolerance is not None or RESOLUTION.get(self.precision, 0.0) <= RESOLUTION["float64"]:
            return False
        if not self.findings:
            return self.too_noisy is not None or self.relies_on_paths or self.is_mostly_rounding
        # Different numbers may cause other calls or shapes later, but no disagreement between ranks.
        causes = {finding.cause for finding in self.findings}
        return self.findings[0].cause in ("values", "branch") and causes <= {"values", "structure", "branch"}


def compare(
    one: Recording, many: Sequence[Recording], noise: Sequence[Recording], *, tolerance: float | None = None
) -> Comparison:
    """Compare `many`, all ranks of a run, with `one` on one worker; `noise` repeats `one` with perturbations.

    The runs in `noise` may be stopped earlier than the others.
    """
    repeated = [measure(take_beginning(one, repetition), repetition) for repetition in noise]
    measured = [measure(one, recording) for recording in many]
    among = [measure(many[0], recording) for recording in many[1:]]
    noise_differences = [differences for differences, _ in repeated]
    noise_floor = NoiseFloor(noise_differences, tolerance=tolerance)
    findings = [found for pair in repeated for found in _check_repeatable(*pair)]
    for recording, pair in zip(many, measured, strict=True):
        findings += _check_limits(*pair, noise_floor, f"rank {recording.rank}")
    for recording, pair in zip(many[1:], among, strict=True):
        findings += _check_ranks_agree(*pair, recording.rank)
    findings.sort(key=lambda finding: finding.location.position)
    findings = [replace(finding, call=_find_call(finding, one)) for finding in findings]
    against_one = [differences for differences, _ in measured]
    flat = [item for differences in against_one for item in differences]
    decisive = flat if tolerance is None else []
    losses_one, losses_many = extract_losses(one), extract_losses(many[0]) if many else ()
    return Comparison(
        steps=one.steps,
        calls=sum(isinstance(result, JobCalled) for result in one.results),
        rows=(
            *_make_rows(flat, noise_floor),
            make_row("ranks among each other", [item for differences, _ in among for item in differences], None),
        ),
        findings=tuple(findings),
        losses_one=losses_one,
        losses_many=losses_many,
        largest_loss_difference=max(
            (_find_largest_gap(losses_one, extract_losses(rank)) for rank in many), default=0.0
        ),
        largest_parameter_difference=_find_largest_parameter(one, against_one, lambda item: item.size),
        loss_noise=max((_find_largest_gap(losses_one, extract_losses(run)) for run in noise), default=0.0),
        parameter_noise=_find_largest_parameter(one, against_one, noise_floor.noise),
        precision=max((item.dtype for item in flat), key=lambda dtype: RESOLUTION.get(dtype, 0.0), default=""),
        stopped=one.stopped,
        noise_steps=min((one.steps, *(run.steps for run in noise))),
        tolerance=None
        if tolerance is None
        else _measure_tolerance_use(tolerance, noise_floor, flat, noise_differences),
        all_rounding=noise_floor.all_rounding,
        too_noisy=find_too_noisy(decisive, noise_floor),
        is_mostly_rounding=is_mostly_rounding(decisive, noise_floor),
        relies_on_paths=any(noise_floor.relies_on_path(item) for item in decisive),
    )


def _measure_tolerance_use(
    tolerance: float, noise_floor: NoiseFloor, found: Sequence[Difference], noise: Sequence[Sequence[Difference]]
) -> Tolerance:
    repeated = [item for differences in noise for item in differences]
    unmet = next((item for item in repeated if not item.size <= noise_floor.limit(item)), None)
    if unmet is None and not all(item.size <= noise_floor.limit(item) for item in found):
        # Rounding is allowed, and a single loss may by chance be equal in the repetition.
        unmet = next((item for item in repeated if noise_floor.relative_size(item) > tolerance), None)
    return Tolerance(
        tolerance=tolerance,
        largest_difference=max(map(noise_floor.relative_size, found), default=0.0),
        noise_floor=max(map(noise_floor.relative_size, repeated), default=0.0),
        unmet=None if unmet is None else f"{unmet.tensor}, step {unmet.location.step}",
    )


def _find_call(finding: Divergence, one: Recording) -> InspectedCall | None:
    """Return the job call in which or after which numbers differ."""
    if finding.cause not in ("values", "ranks") or finding.location.position >= len(one.results):
        return None
    before = (
        result for result in reversed(one.results[: finding.location.position + 1]) if isinstance(result, JobCalled)
    )
    called = next(before, None)
    return None if called is None else InspectedCall(job=called.job, call=called.call)


def extract_losses(recording: Recording) -> tuple[float, ...]:
    """Return the loss of every training call, the mean if it has one value per sample."""
    found = []
    for call, step in zip(recording.results, recording.results[1:], strict=False):
        if isinstance(call, JobCalled) and isinstance(step, StepRecorded):
            leaf = find_loss_leaf(call)
            if leaf is not None:
                values = to_array(leaf)
                found.append(float(values.mean()) if values.size else math.nan)
    return tuple(found)


def find_loss_leaf(call: JobCalled) -> Leaf | None:
    """Return the loss among a training call's results: its result, its "loss", or its first float tensor."""
    floats = [leaf for leaf in call.leaves if not leaf.is_integer]
    named = [leaf for leaf in floats if leaf.path in ("", "['loss']")]
    return next(iter(named or floats), None)


def _find_largest_gap(first: Sequence[float], second: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(first, second, strict=False) if a != b), default=0.0)


def _find_largest_parameter(
    one: Recording, runs: Sequence[Sequence[Difference]], size: Callable[[Difference], float]
) -> float:
    """Return the largest size of the differences of final parameters; nan for a beginning, which has none."""
    parameters = {final.name for final in one.described if final.kind != "buffer"}
    finals = [item for differences in runs for item in differences if item.kind == "final"]
    return max((size(item) for item in finals if item.tensor in parameters), default=0.0 if one.finished else math.nan)


def _check_repeatable(differences: Sequence[Difference], mismatch: Mismatch | None) -> Iterator[Divergence]:
    first = next((item.location.position for item in differences if item.kind == "gradient"), math.inf)
    for item in differences:
        # A result may be zero but for rounding, as a difference of numbers as large as the largest result.
        rounding = RESOLUTION.get(item.dtype, 0.0) * item.largest
        limit = NOT_REPEATABLE_FACTOR * max(compute_rounding_limit(item), rounding)
        if item.location.position < first and not item.is_integer_result and item.size > limit:
            expected = (
                "the run on one worker, repeated, to begin with the same values "
                "(seed all random generators of the script; read no file of an earlier run)"
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
        cause: Cause = "branch" if any(item.size > 0 for item in differences) else "repetition"
        yield _make_divergence(mismatch, "the run on one worker, repeated", cause=cause)


def _check_limits(
    differences: Sequence[Difference], mismatch: Mismatch | None, noise_floor: NoiseFloor, run_name: str
) -> Iterator[Divergence]:
    """Yield the first difference beyond its limit, and the mismatch."""
    yield from find_first_excess(differences, noise_floor, "the run on one worker", run_name)
    if mismatch is not None:
        # Other calls after other numbers may follow from rounding; other calls after equal numbers cannot.
        cause: Cause = "structure"
        if any(item.size > 0 for item in differences) and mismatch.tensor == "the calls":
            cause = "branch"
        yield _make_divergence(mismatch, run_name, cause=cause)


def find_first_excess(
    differences: Sequence[Difference], noise_floor: NoiseFloor, from_what: str, run_name: str
) -> Iterator[Divergence]:
    """Yield the first difference beyond its limit, if there is one.

    Args:
        differences: The differences, in the order of the run.
        noise_floor: Their limits.
        from_what: What the run should be near, in words.
        run_name: The run, in words.
    """
    for item in differences:
        limit = noise_floor.limit(item)
        if not item.size <= limit:
            bound = "" if noise_floor.tolerance is None else f"tolerance {noise_floor.tolerance:g}, "
            yield Divergence(
                location=item.location,
                tensor=item.tensor,
                expected=f"at most {limit:.3g} from {from_what} ({bound}noise {noise_floor.noise(item):.3g})",
                found=f"{item.size:.3g} on {run_name}",
                cause="values",
                is_gross=is_gross(item, differences, noise_floor),
                excess=item.size / limit if limit > 0 else math.inf,
            )
            return


def is_gross(first: Difference, differences: Sequence[Difference], noise_floor: NoiseFloor) -> bool:
    """Whether rounding explains a difference in no precision: most gradients of its step differ far beyond the noise.

    A result may jump by rounding, as a count or the largest of several numbers does, and a few gradients with it.
    """
    step = [item for item in differences if item.kind == "gradient" and item.location.step == first.location.step]
    gross = [item for item in step if item.size > max(GROSS_FACTOR * noise_floor.limit(item), GROSS_SHARE * item.scale)]
    return 2 * len(gross) >= len(step) > 0


def _check_ranks_agree(differences: Sequence[Difference], mismatch: Mismatch | None, rank: int) -> Iterator[Divergence]:
    for item in differences:
        if not item.size <= compute_rounding_limit(item):
            expected = f"rank {rank} to agree with rank 0, within {compute_rounding_limit(item):.3g}"
            found = f"{item.size:.3g}"
            yield Divergence(location=item.location, tensor=item.tensor, expected=expected, found=found, cause="ranks")
            break
    if mismatch is not None:
        yield _make_divergence(mismatch, f"rank {rank}, beside rank 0", cause="ranks")


def _make_divergence(mismatch: Mismatch, run_name: str, *, cause: Cause) -> Divergence:
    return Divergence(
        location=mismatch.location,
        tensor=mismatch.tensor,
        expected=mismatch.expected,
        found=f"{mismatch.found}, on {run_name}" if run_name.startswith("rank") else f"{mismatch.found}, in {run_name}",
        cause=cause,
    )


def _make_rows(differences: Sequence[Difference], noise_floor: NoiseFloor) -> Iterator[TableLine]:
    names = {
        "losses and other results": ("result", False),
        "whole-number results": ("result", True),
        "gradients, each step": ("gradient", False),
        "parameters and buffers, each step": ("parameter", False),
        "parameters and buffers, final": ("final", False),
    }
    for name, sort in names.items():
        yield make_row(name, [item for item in differences if (item.kind, item.is_integer_result) == sort], noise_floor)


def make_row(name: str, items: Sequence[Difference], noise_floor: NoiseFloor | None) -> TableLine:
    """Return the table's line for some differences; without a noise floor rounding alone limits them."""
    if noise_floor is None:
        limits, noise = list(map(compute_rounding_limit, items)), None
    else:
        limits, noise = list(map(noise_floor.limit, items)), max(map(noise_floor.noise, items), default=0.0)
    worst, limit = _find_nearest(items, limits)
    if worst is not None and worst.size == 0:
        worst = None  # all are equal
    return TableLine(
        name=name,
        compared=len(items),
        largest_difference=max((item.size for item in items), default=0.0),
        noise_floor=noise,
        nearest=None if worst is None else f"{worst.tensor}, step {worst.location.step}",
        nearest_difference=None if worst is None else worst.size,
        nearest_limit=None if worst is None else limit,
    )


def _find_nearest(items: Sequence[Difference], limits: Sequence[float]) -> tuple[Difference | None, float]:
    """Return the difference nearest to its limit, or furthest beyond it, with the limit."""
    ratios = [
        item.size / limit if limit > 0 else (math.inf if item.size > 0 else 0.0)
        for item, limit in zip(items, limits, strict=True)
    ]
    if not ratios:
        return None, 0.0
    index = max(range(len(ratios)), key=ratios.__getitem__)
    return items[index], limits[index]
