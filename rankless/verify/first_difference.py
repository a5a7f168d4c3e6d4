"""Where in a job two runs part first: all values of one call, compared in the order in which they were computed.

# Note [which value is first]: a fault spreads to all that is computed from it, so the first value that is further apart
# than rounding explains names the line. Allowed is the largest of 10 x the same value's noise (the one-worker run
# disturbed), the rounding bound of its norm, and 100 rounding errors of the largest value that it was computed from.
# Whole numbers and truth values are looked at where they go in only: a mask that rounding turns over is no cause, and
# what is computed with it shows.
"""

import math
import os
from collections.abc import Sequence
from typing import Literal

import msgspec

from rankless.config.run_config import InspectedCall
from rankless.records.job_values import ComputedValue
from rankless.verify.differences import RESOLUTION, compute_sketch_distance
from rankless.verify.tolerance import GRADIENT_ROUNDING_ERRORS, NOISE_FACTOR, ROUNDING_BOUND

Fault = Literal["value", "input", "output", "capture", "after", "program"]
"""What parts first: a value that is computed; one that goes into the job; one that was right and is no longer so when
it comes out; the captured program from the plain call, on one worker already; nothing, so that it is something after
the job; the programs themselves.
"""


class FirstValue(msgspec.Struct, frozen=True, kw_only=True):
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
    """The Euclidean distance, about."""
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
) -> FirstValue | None:
    """The first value that parts; None if the call was not made, or nothing was written down.

    `tolerance` is a bound of the user's own, as a part of each value, in place of the noise and the rounding bound.
    """
    program = [value for value in one if value.role != "plain"]
    if not program or not all(many):
        return None
    allowed = ValueLimits(one, noise, tolerance)
    plain = {value.name: value for value in one if value.role == "plain"}
    for value in program:
        if value.role == "output" and value.name in plain and not allowed.hold(value, plain[value.name]):
            return _make_first_value("capture", value, plain[value.name], allowed, rank=0, call=call)
    diverged: tuple[int, Fault, int] | None = None
    theirs = [{(value.role, value.name): value for value in values} for values in many]
    for rank, values in enumerate(theirs):
        if values.keys() != {(value.role, value.name) for value in program}:
            return _make_first_value("program", program[0], program[0], allowed, rank=rank, call=call)
        for index, ours in enumerate(program):
            if not allowed.hold(ours, values[ours.role, ours.name]):
                fault: Fault = ours.role if ours.role != "plain" else "output"
                diverged = min(diverged or (index, fault, rank), (index, fault, rank))
                break
    if diverged is None:
        return _make_first_value("after", program[-1], program[-1], allowed, rank=0, call=call)
    index, fault, rank = diverged
    ours = program[index]
    return _make_first_value(fault, ours, theirs[rank][ours.role, ours.name], allowed, rank=rank, call=call)


class ValueLimits:
    """How far each value may be apart."""

    def __init__(self, one: Sequence[ComputedValue], noise: Sequence[ComputedValue], tolerance: float | None) -> None:
        self._tolerance = tolerance
        self._norms = {value.name: value.value.norm for value in one if value.role != "plain"}
        ours = {(value.role, value.name): value for value in one}
        self._noise: dict[Key, float] = {}
        for value in noise:
            known = ours.get((value.role, value.name))
            if known is not None:
                self._noise[value.role, value.name] = compute_sketch_distance(known.value, value.value)

    def hold(self, value: ComputedValue, other: ComputedValue) -> bool:
        """Whether two runs' values are as near as right ones are."""
        if value.dtype not in ROUNDING_BOUND and value.role != "input":
            return True
        if (value.dtype, value.shape) != (other.dtype, other.shape):
            return False
        return compute_sketch_distance(value.value, other.value) <= self.of(value)

    def of(self, value: ComputedValue) -> float:
        """The largest distance that rounding explains."""
        norms = [value.value.norm, *(self._norms.get(name, 0.0) for name in value.inputs)]
        largest = max((norm for norm in norms if math.isfinite(norm)), default=0.0)
        norm = value.value.norm if math.isfinite(value.value.norm) else 0.0
        errors = GRADIENT_ROUNDING_ERRORS * RESOLUTION.get(value.dtype, 0.0) * largest
        if self._tolerance is not None:
            return max(self._tolerance * norm, errors)
        noise = NOISE_FACTOR * self._noise.get((value.role, value.name), 0.0)
        return max(noise, ROUNDING_BOUND.get(value.dtype, 0.0) * norm, errors)


def _make_first_value(
    fault: Fault, value: ComputedValue, other: ComputedValue, allowed: ValueLimits, *, rank: int, call: InspectedCall
) -> FirstValue:
    return FirstValue(
        fault=fault,
        job=call.job,
        call=call.call,
        line=value.line,
        operator=value.operator,
        name=value.name,
        dtype=value.dtype,
        shape=value.shape,
        size=compute_sketch_distance(value.value, other.value),
        allowed=allowed.of(value),
        rank=rank,
    )


def render_first_value(first: FirstValue) -> str:
    """The first value that differs in one line, as "first value to part: train.py:31, native_layer_norm, …"."""
    where = f"{os.path.basename(first.line)}, " if first.line else ""
    what = f"{first.dtype}{list(first.shape)}: {first.size:.3g} apart, at most {first.allowed:.3g} by rounding"
    call = f"call {first.call} of {first.job}"
    match first.fault:
        case "value":
            return f"first value to part, in {call}: {where}{first.operator}, {what}, on rank {first.rank}"
        case "input":
            return f"first value to part, in {call}: {where}{first.name}, as it goes in, {what}, on rank {first.rank}"
        case "output":
            return (
                f"first value to part, in {call}: {where}{first.name}, right as {first.operator} gave it, wrong after "
                f"its way between workers, {what}, on rank {first.rank}"
            )
        case "capture":
            return (
                f"first value to part, in {call}: {where}{first.name}, already on one worker, between the captured "
                f"program and the plain call, {what}; the capture is at fault"
            )
        case "program":
            return f"first to part: the programs of {call} themselves, which are not the same on 1 worker and on more"
    return (
        f"every value of {call} agrees, what goes in, what is computed and its gradients: what differs is made after "
        "it, by the optimizer's step or by the script"
    )
