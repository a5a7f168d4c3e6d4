"""Find the first value that differs between two runs of one job call, in the order of computation.

Note [the first value]: a fault spreads to everything that is computed from it. The first value that differs by more
than rounding explains therefore names the faulty line. The limit is the largest of three bounds: 10 x the noise in the
same value, from the perturbed one-worker run; the rounding bound of its norm; and 100 rounding errors of the largest
value that it was computed from. Integers and booleans are compared only as inputs. A mask that rounding flips is no
cause, and values computed with it show the effect.
"""

import math
import os
from collections.abc import Sequence
from typing import Literal

import msgspec

from rankless.config.run_config import InspectedCall
from rankless.records.verify_recording_format import ComputedValue
from rankless.verify.differences import RESOLUTION, compute_sketch_distance
from rankless.verify.noise_floor import GRADIENT_ROUNDING_ERRORS, NOISE_FACTOR, ROUNDING_BOUND

Fault = Literal["value", "input", "output", "capture", "after", "program"]
"""What differs first.

"value": a computed value. "input": a value that enters the job. "output": a value that was correct and is wrong when it
leaves the job. "capture": the captured program differs from the plain call on one worker already. "after": nothing, so
the cause follows the job. "program": the programs themselves.
"""


class FirstDifferingValue(msgspec.Struct, frozen=True, kw_only=True):
    """The first value of a job call that differs between the runs."""

    fault: Fault
    job: str
    call: int
    line: str
    operator: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    size: float
    """The approximate Euclidean distance."""
    allowed: float
    rank: int


Key = tuple[str, str]
"""A value's role and name."""


def find_first_value(
    one: Sequence[ComputedValue],
    many: Sequence[Sequence[ComputedValue]],
    noise: Sequence[ComputedValue],
    *,
    call: InspectedCall,
    tolerance: float | None = None,
) -> FirstDifferingValue | None:
    """Return the first value that differs, or None if the call was not made or nothing was recorded.

    `tolerance` is the user's bound, relative to each value. It replaces the noise and the rounding bound.
    """
    program = [value for value in one if value.role != "plain"]
    if not program or not all(many):
        return None
    limits = ValueLimits(one, noise, tolerance)
    plain = {value.name: value for value in one if value.role == "plain"}
    for value in program:
        if value.role == "output" and value.name in plain and not limits.is_within_limit(value, plain[value.name]):
            return _make_first_value("capture", value, plain[value.name], limits, rank=0, call=call)
    diverged: tuple[int, Fault, int] | None = None
    theirs = [{(value.role, value.name): value for value in values} for values in many]
    for rank, values in enumerate(theirs):
        if values.keys() != {(value.role, value.name) for value in program}:
            return _make_first_value("program", program[0], program[0], limits, rank=rank, call=call)
        for index, ours in enumerate(program):
            if not limits.is_within_limit(ours, values[ours.role, ours.name]):
                fault: Fault = ours.role if ours.role != "plain" else "output"
                diverged = min(diverged or (index, fault, rank), (index, fault, rank))
                break
    if diverged is None:
        return _make_first_value("after", program[-1], program[-1], limits, rank=0, call=call)
    index, fault, rank = diverged
    ours = program[index]
    return _make_first_value(fault, ours, theirs[rank][ours.role, ours.name], limits, rank=rank, call=call)


class ValueLimits:
    """The limit of each value's difference."""

    def __init__(self, one: Sequence[ComputedValue], noise: Sequence[ComputedValue], tolerance: float | None) -> None:
        self._tolerance = tolerance
        self._norms = {value.name: value.value.norm for value in one if value.role != "plain"}
        ours = {(value.role, value.name): value for value in one}
        self._noise: dict[Key, float] = {}
        for value in noise:
            known = ours.get((value.role, value.name))
            if known is not None:
                self._noise[value.role, value.name] = compute_sketch_distance(known.value, value.value)

    def is_within_limit(self, value: ComputedValue, other: ComputedValue) -> bool:
        """Whether the values of two runs are within their limit."""
        if value.dtype not in ROUNDING_BOUND and value.role != "input":
            return True
        if (value.dtype, value.shape) != (other.dtype, other.shape):
            return False
        return compute_sketch_distance(value.value, other.value) <= self.limit(value)

    def limit(self, value: ComputedValue) -> float:
        """Return the largest distance that rounding explains."""
        norms = [value.value.norm, *(self._norms.get(name, 0.0) for name in value.inputs)]
        largest = max((norm for norm in norms if math.isfinite(norm)), default=0.0)
        norm = value.value.norm if math.isfinite(value.value.norm) else 0.0
        errors = GRADIENT_ROUNDING_ERRORS * RESOLUTION.get(value.dtype, 0.0) * largest
        if self._tolerance is not None:
            return max(self._tolerance * norm, errors)
        noise = NOISE_FACTOR * self._noise.get((value.role, value.name), 0.0)
        return max(noise, ROUNDING_BOUND.get(value.dtype, 0.0) * norm, errors)


def _make_first_value(
    fault: Fault, value: ComputedValue, other: ComputedValue, limits: ValueLimits, *, rank: int, call: InspectedCall
) -> FirstDifferingValue:
    return FirstDifferingValue(
        fault=fault,
        job=call.job,
        call=call.call,
        line=value.line,
        operator=value.operator,
        name=value.name,
        dtype=value.dtype,
        shape=value.shape,
        size=compute_sketch_distance(value.value, other.value),
        allowed=limits.limit(value),
        rank=rank,
    )


def render_first_value(first: FirstDifferingValue) -> str:
    """Describe the first value that differs in one line."""
    where = f"{os.path.basename(first.line)}, " if first.line else ""
    what = f"{first.dtype}{list(first.shape)}: {first.size:.3g} apart, at most {first.allowed:.3g} by rounding"
    call = f"call {first.call} of {first.job}"
    match first.fault:
        case "value":
            return f"first value that differs, in {call}: {where}{first.operator}, {what}, on rank {first.rank}"
        case "input":
            return f"first value that differs, in {call}: {where}{first.name}, an input, {what}, on rank {first.rank}"
        case "output":
            return (
                f"first value that differs, in {call}: {where}{first.name}, correct as {first.operator} computed it, "
                f"wrong after its redistribution between workers, {what}, on rank {first.rank}"
            )
        case "capture":
            return (
                f"first value that differs, in {call}: {where}{first.name}, already on one worker, between the "
                f"captured program and the plain call, {what}; the capture is at fault"
            )
        case "program":
            return f"first to differ: the programs of {call} themselves, which are not the same on 1 worker and on more"
    return (
        f"every value of {call} agrees: inputs, computed values and gradients; the difference arises after it, in the "
        "optimizer's step or in the script"
    )
