"""Are two runs the same training? Recordings in, a verdict out.

# Note [what is allowed]: two right runs sum in different orders, so they differ by rounding, and training
# amplifies it. How much, no constant can say; the noise run can: the one-worker run with its last bits
# disturbed (views/recording.py, Note [noise floor]). A difference is allowed up to the largest of
#   - 10 x the noise in the same tensor, the largest of this and earlier steps;
#   - the rounding bound: 1e-12 (float64), 1e-5 (float32), 1e-2 (float16), 5e-2 (bfloat16) of the tensor's
#     largest element, or of its norm where only a sketch is kept;
#   - 10 rounding errors (eps) of the largest parameter, 100 of the largest gradient: some tensors are zero but
#     for rounding, and a gradient is a sum over the whole batch;
#   - twice the tensor's own motion, for a parameter whose gradient the noise changes by a tenth or more of its
#     norm: it is all rounding, and an adaptive optimizer makes whole steps of it, in any direction.
# An integer result must be equal, unless the noise run's differs too (10 x that), or unless the relative noise
# of float results and parameters so far, ten times over, makes a flip likelier than one in ten among what was counted:
# then as many as it makes likely, but not more than 2 % of what was counted, and at least one.
# Ranks of one run must agree within the rounding bound alone: they hold copies, and copies do not drift apart.
# Where a max-pool, a ReLU or an argmax is turned over by rounding, a step jumps, and one noise run need not jump
# at the same one. No measured floor bounds that; exacter arithmetic does: `needs_float64` says when it is to decide,
# also where noise is so loud that faults could hide in it (docs/decisions/0004-noise-floor.md).
# If the one-worker run's repetition differs by over 1,000 x the rounding bound before its first step is made,
# the script is not repeatable, and nothing can be said.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rankless.observe.differences import RESOLUTION, Difference, Mismatch, Place, measure
from rankless.observe.recordings import Recording, array_of
from rankless.records.results import Called, Stepped

NOISE_FACTOR = 10.0
ROUNDING_ERRORS = 10.0
GRADIENT_ROUNDING_ERRORS = 100.0
ROUNDING_BOUND: Mapping[str, float] = {
    "float64": 1e-12,
    "complex128": 1e-12,
    "float32": 1e-5,
    "complex64": 1e-5,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
ALL_ROUNDING = 0.1
"""A gradient that the noise changes by this part of its norm says nothing but rounding."""
LIKELY_FLIP = 0.1
MOST_FLIPS = 0.02
NOT_REPEATABLE_FACTOR = 1e3
LOUD_NOISE = 1e-3
"""Noise in the losses, as a part of the largest one, from which on equal within the noise says little."""

Cause = Literal["values", "structure", "ranks", "repetition"]
"""What is not the same: numbers, which rounding may explain; calls, shapes or tensors; ranks of one run among
each other; the one-worker run and its repetition.
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not the same, and where."""

    place: Place
    tensor: str
    expected: str
    found: str
    cause: Cause


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: all comparisons of one kind, and the one nearest to its limit or furthest beyond."""

    name: str
    compared: int
    largest: float
    noise: float | None
    worst: Difference | None
    worst_allowed: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came out: `findings` in the order of the run, none if it is the same training."""

    steps: int
    calls: int
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    losses_one: tuple[float, ...]
    losses_many: tuple[float, ...]
    largest_loss_difference: float
    largest_parameter_difference: float
    loss_noise: float
    parameter_noise: float
    precision: str
    """The coarsest dtype of all that was compared, as "float32"; empty if there were whole numbers only."""

    @property
    def needs_float64(self) -> bool:
        """Whether finer arithmetic should decide: numbers part, which it may bring together, or noise hides much."""
        if RESOLUTION.get(self.precision, 0.0) <= RESOLUTION["float64"]:
            return False
        if not self.findings:
            largest = max((abs(loss) for loss in self.losses_one if math.isfinite(loss)), default=0.0)
            return self.loss_noise > LOUD_NOISE * largest
        # Other calls or shapes may follow from numbers that have parted before; ranks that disagree do not.
        causes = {finding.cause for finding in self.findings}
        return self.findings[0].cause == "values" and causes <= {"values", "structure"}


class Allowance:
    """How far a difference may go, learned from how far the noise runs are from the one-worker run."""

    def __init__(self, noise: Sequence[Sequence[Difference]]) -> None:
        self._noise: dict[tuple[str, str, int], float] = {}
        self._relative: dict[int, float] = {}
        self._last: dict[str, float] = {}
        self._all_rounding: dict[str, int] = {}
        for differences in noise:
            self._learn(differences)

    def _learn(self, differences: Sequence[Difference]) -> None:
        running: dict[tuple[str, str], float] = {}
        relative = 0.0
        for item in differences:
            position = item.place.position
            tensor = (item.kind, item.tensor)
            running[tensor] = max(running.get(tensor, 0.0), item.size)
            key = (*tensor, position)
            self._noise[key] = max(self._noise.get(key, 0.0), running[tensor])
            if item.kind in ("result", "parameter") and not item.is_integer_result and item.scale > 0:
                relative = max(relative, item.size / item.scale)
            self._relative[position] = max(self._relative.get(position, 0.0), relative)
            if item.kind == "parameter":
                self._last[item.tensor] = max(self._last.get(item.tensor, 0.0), running[tensor])
            if item.kind == "gradient" and item.size > ALL_ROUNDING * item.scale:
                name = item.tensor.removeprefix("gradient of ")
                self._all_rounding[name] = min(self._all_rounding.get(name, position), position)

    def noise(self, item: Difference) -> float:
        """The noise in this tensor so far."""
        noise = self._noise.get((item.kind, item.tensor, item.place.position), 0.0)
        if item.kind == "final":
            # A lone number may by chance end where it would have without noise; its way there tells more.
            noise = max(noise, self._last.get(item.tensor, 0.0) / math.sqrt(max(1, item.count)))
        return noise

    def limit(self, item: Difference) -> float:
        """The largest `size` that is still the same training."""
        limit = max(NOISE_FACTOR * self.noise(item), rounding_limit(item))
        if item.is_integer_result:
            flips = NOISE_FACTOR * self._relative.get(item.place.position, 0.0) * item.count
            if flips >= LIKELY_FLIP:
                limit = max(limit, math.ceil(min(flips, MOST_FLIPS * item.count)))
        name_position = self._all_rounding.get(item.tensor, math.inf)
        if item.kind in ("parameter", "final") and name_position <= item.place.position:
            limit = max(limit, 2 * item.motion)
        return limit


def rounding_limit(item: Difference) -> float:
    """What rounding alone explains, with no training between."""
    errors = GRADIENT_ROUNDING_ERRORS if item.kind == "gradient" else ROUNDING_ERRORS
    return max(ROUNDING_BOUND.get(item.dtype, 0.0) * item.scale, errors * item.resolution)


def compare(one: Recording, many: Sequence[Recording], noise: Sequence[Recording]) -> Comparison:
    """What sets `many`, all ranks of a run, apart from `one`, the run on one worker; `noise` repeats that."""
    findings: list[Finding] = []
    noise_differences = []
    for repetition in noise:
        differences, mismatch = measure(one, repetition)
        noise_differences.append(differences)
        findings += _unrepeatable(differences, mismatch)
    allowance = Allowance(noise_differences)
    against_one = []
    for recording in many:
        differences, mismatch = measure(one, recording)
        against_one.append(differences)
        findings += _beyond(differences, mismatch, allowance, f"rank {recording.rank}")
    among = []
    for recording in many[1:]:
        differences, mismatch = measure(many[0], recording)
        among.append(differences)
        findings += _disagreeing(differences, mismatch, recording.rank)
    findings.sort(key=lambda finding: finding.place.position)
    flat = [item for differences in against_one for item in differences]
    losses_one, losses_many = losses(one), losses(many[0]) if many else ()
    return Comparison(
        steps=one.steps,
        calls=sum(isinstance(result, Called) for result in one.results),
        rows=(
            *_rows(flat, allowance),
            _agreement_row([item for differences in among for item in differences]),
        ),
        findings=tuple(findings),
        losses_one=losses_one,
        losses_many=losses_many,
        largest_loss_difference=max((_apart(losses_one, losses(rank)) for rank in many), default=0.0),
        largest_parameter_difference=_largest_parameter(one, against_one),
        loss_noise=max((_apart(losses_one, losses(run)) for run in noise), default=0.0),
        parameter_noise=_largest_parameter(one, noise_differences),
        precision=max((item.dtype for item in flat), key=lambda dtype: RESOLUTION.get(dtype, 0.0), default=""),
    )


def losses(recording: Recording) -> tuple[float, ...]:
    """The loss of every training call: its result, its "loss", or its first float; the mean if it has many."""
    found = []
    for call, step in zip(recording.results, recording.results[1:], strict=False):
        if isinstance(call, Called) and isinstance(step, Stepped):
            floats = [leaf for leaf in call.leaves if not leaf.is_integer]
            named = [leaf for leaf in floats if leaf.path in ("", "['loss']")]
            for leaf in (named or floats)[:1]:
                values = array_of(leaf)
                found.append(float(values.mean()) if values.size else math.nan)
    return tuple(found)


def _apart(first: Sequence[float], second: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(first, second, strict=False) if a != b), default=0.0)


def _largest_parameter(one: Recording, runs: Sequence[Sequence[Difference]]) -> float:
    parameters = {final.name for final in one.described if final.is_parameter}
    sizes = [
        item.size for differences in runs for item in differences if item.kind == "final" and item.tensor in parameters
    ]
    return max(sizes, default=0.0)


def _unrepeatable(differences: Sequence[Difference], mismatch: Mismatch | None) -> Iterator[Finding]:
    first = next((item.place.position for item in differences if item.kind == "gradient"), math.inf)
    for item in differences:
        limit = NOT_REPEATABLE_FACTOR * rounding_limit(item)
        if item.place.position < first and not item.is_integer_result and item.size > limit:
            expected = "the run on one worker, repeated, to begin alike (seed what the script draws from)"
            yield Finding(
                place=item.place,
                tensor=item.tensor,
                expected=expected,
                found=f"they differ by {item.size:.3g}",
                cause="repetition",
            )
            return
    if mismatch is not None:
        yield _finding_of(mismatch, "the run on one worker, repeated", cause="repetition")


def _beyond(
    differences: Sequence[Difference], mismatch: Mismatch | None, allowance: Allowance, who: str
) -> Iterator[Finding]:
    """The first difference that is not allowed, and the mismatch."""
    for item in differences:
        limit = allowance.limit(item)
        if not item.size <= limit:
            expected = f"at most {limit:.3g} from the run on one worker (noise {allowance.noise(item):.3g})"
            found = f"{item.size:.3g} on {who}"
            yield Finding(place=item.place, tensor=item.tensor, expected=expected, found=found, cause="values")
            break
    if mismatch is not None:
        yield _finding_of(mismatch, who, cause="structure")


def _disagreeing(differences: Sequence[Difference], mismatch: Mismatch | None, rank: int) -> Iterator[Finding]:
    for item in differences:
        if not item.size <= rounding_limit(item):
            expected = f"rank {rank} to agree with rank 0, within {rounding_limit(item):.3g}"
            found = f"{item.size:.3g}"
            yield Finding(place=item.place, tensor=item.tensor, expected=expected, found=found, cause="ranks")
            break
    if mismatch is not None:
        yield _finding_of(mismatch, f"rank {rank}, beside rank 0", cause="ranks")


def _finding_of(mismatch: Mismatch, who: str, *, cause: Cause) -> Finding:
    return Finding(
        place=mismatch.place,
        tensor=mismatch.tensor,
        expected=mismatch.expected,
        found=f"{mismatch.found}, on {who}" if who.startswith("rank") else f"{mismatch.found}, in {who}",
        cause=cause,
    )


def _rows(differences: Sequence[Difference], allowance: Allowance) -> Iterator[Row]:
    names = {
        "losses and other results": ("result", False),
        "whole-number results": ("result", True),
        "gradients, each step": ("gradient", False),
        "parameters and buffers, each step": ("parameter", False),
        "parameters and buffers, final": ("final", False),
    }
    for name, sort in names.items():
        items = [item for item in differences if (item.kind, item.is_integer_result) == sort]
        limits = [allowance.limit(item) for item in items]
        worst, limit = _nearest(items, limits)
        yield Row(
            name=name,
            compared=len(items),
            largest=max((item.size for item in items), default=0.0),
            noise=max((allowance.noise(item) for item in items), default=0.0),
            worst=worst,
            worst_allowed=limit,
        )


def _agreement_row(items: Sequence[Difference]) -> Row:
    worst, limit = _nearest(items, [rounding_limit(item) for item in items])
    largest = max((item.size for item in items), default=0.0)
    return Row(
        name="ranks among each other",
        compared=len(items),
        largest=largest,
        noise=None,
        worst=worst,
        worst_allowed=limit,
    )


def _nearest(items: Sequence[Difference], limits: Sequence[float]) -> tuple[Difference | None, float]:
    """The difference that came nearest to its limit, or went furthest beyond it."""
    ratios = [
        item.size / limit if limit > 0 else (math.inf if item.size > 0 else 0.0)
        for item, limit in zip(items, limits, strict=True)
    ]
    if not ratios:
        return None, 0.0
    index = max(range(len(ratios)), key=ratios.__getitem__)
    return items[index], limits[index]
