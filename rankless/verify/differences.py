"""Measure how far two recordings differ at each location, without judging it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rankless.records.verify_recording_format import (
    JobCalled,
    Leaf,
    ModelRegistered,
    ResultRecord,
    StepRecorded,
    TensorState,
    TensorSummary,
)
from rankless.verify.read_and_combine_recordings import Array, Recording, to_array

Kind = Literal["result", "gradient", "parameter", "final"]

RESOLUTION: Mapping[str, float] = {
    "float64": 2.0**-52,
    "complex128": 2.0**-52,
    "float32": 2.0**-23,
    "complex64": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
"""The distance from 1 to the next number, by dtype. Integers do not round."""


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """A location in a run: the index of the result (final tensors come last), the step, the script's line."""

    position: int
    step: int
    line: str


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor at one location of two runs."""

    location: RunPosition
    kind: Kind
    tensor: str
    dtype: str
    size: float
    """Absolute difference; for integer tensors the number of different elements; inf if one run is not finite."""
    scale: float
    """The size that bounds are relative to: the largest element, or the norm if only the norm is known."""
    resolution: float
    """The distance between neighboring numbers of the dtype near the largest tensor of this kind."""
    count: int
    path: float = 0.0
    """The length of the tensor's path since before the first step: the sum of its steps, the longer of both runs'."""
    largest: float = 0.0
    """The norm of the largest gradient of its step, for a gradient; for a result, the largest number so far."""
    is_integer_result: bool = False


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The location from which on two runs cannot be compared: other calls, shapes or tensors."""

    location: RunPosition
    tensor: str
    expected: str
    found: str


class TravelledDistances:
    """How far each tensor has travelled in two runs, step by step.

    A tensor whose gradient is all rounding moves in a random direction at each step. Its distance from where it
    began says little about its steps; the length of its path is their sum.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], TensorSummary] = {}
        self._lengths: dict[tuple[int, str], float] = {}

    def add(self, ours: Sequence[TensorState], theirs: Sequence[TensorState]) -> None:
        """Add a step of both runs, or where they begin."""
        for run, states in enumerate((ours, theirs)):
            for state in states:
                key = (run, state.name)
                before = self._last.get(key)
                moved = 0.0 if before is None else compute_sketch_distance(before, state.value)
                self._lengths[key] = self._lengths.get(key, 0.0) + moved
                self._last[key] = state.value

    def longest(self, tensor: str) -> float:
        """Return the longer path of a tensor in the two runs, as a Euclidean length."""
        return max(self._lengths.get((run, tensor), 0.0) for run in (0, 1))


def measure(one: Recording, other: Recording) -> tuple[list[Difference], Mismatch | None]:
    """Return all differences up to the first mismatch, and that mismatch."""
    differences: list[Difference] = []
    paths = TravelledDistances()
    largest_result = 1.0
    for position in range(max(len(one.results), len(other.results))):
        ours = one.results[position] if position < len(one.results) else None
        theirs = other.results[position] if position < len(other.results) else None
        location = locate(one if ours is not None else other, position)
        mismatch = _find_structure_mismatch(ours, theirs, location)
        if mismatch is not None:
            return differences, mismatch
        if isinstance(ours, JobCalled) and isinstance(theirs, JobCalled):
            largest_result = max(largest_result, _find_largest_result(ours))
            differences += _compare_results(ours, theirs, location, largest_result)
        elif isinstance(ours, ModelRegistered | StepRecorded) and isinstance(theirs, ModelRegistered | StepRecorded):
            if isinstance(ours, ModelRegistered) and other.rank != 0:
                paths.add(ours.tensors, ours.tensors)
                continue  # ranks receive rank 0's model at the first call, after this record
            paths.add(ours.tensors, theirs.tensors)
            differences += compare_states(ours.tensors, theirs.tensors, location, paths)
    final = RunPosition(position=len(one.results), step=one.steps, line="")
    if one.finished and other.finished:
        mismatch = _find_tensor_mismatch(one.tensors, other.tensors, final)
        if mismatch is not None:
            return differences, mismatch
        differences += _compare_final_tensors(one, other, final, paths)
    return differences, None


def locate(recording: Recording, position: int) -> RunPosition:
    """Return the location of a result. A training call belongs to the step that follows it."""
    result = recording.results[position]
    if isinstance(result, StepRecorded):
        before = recording.results[position - 1]
        line = before.line if isinstance(before, JobCalled) else ""
        return RunPosition(position=position, step=result.step, line=line)
    if isinstance(result, JobCalled):
        following = recording.results[position + 1 : position + 3]
        trained = next((item for item in following if not isinstance(item, ModelRegistered)), None)
        step = trained.step if isinstance(trained, StepRecorded) and trained.job == result.job else result.steps
        return RunPosition(position=position, step=step, line=result.line)
    return RunPosition(position=position, step=0, line="")


def _find_structure_mismatch(
    ours: ResultRecord | None, theirs: ResultRecord | None, location: RunPosition
) -> Mismatch | None:
    if _describe_result(ours) != _describe_result(theirs):
        return Mismatch(
            location=location, tensor="the calls", expected=_describe_result(ours), found=_describe_result(theirs)
        )
    if isinstance(ours, JobCalled) and isinstance(theirs, JobCalled):
        expected = {leaf.path: f"{leaf.dtype} {list(leaf.shape)}" for leaf in ours.leaves}
        found = {leaf.path: f"{leaf.dtype} {list(leaf.shape)}" for leaf in theirs.leaves}
        names = {path: format_result_name(ours.job, path) for path in expected | found}
    elif isinstance(ours, ModelRegistered | StepRecorded) and isinstance(theirs, ModelRegistered | StepRecorded):
        expected = {state.name: _describe_state(state) for state in ours.tensors}
        found = {state.name: _describe_state(state) for state in theirs.tensors}
        names = {name: name for name in expected | found}
    else:
        return None
    for key, name in names.items():
        if expected.get(key) != found.get(key):
            return Mismatch(
                location=location,
                tensor=name,
                expected=expected.get(key, "no such tensor"),
                found=found.get(key, "no such tensor"),
            )
    return None


def _find_tensor_mismatch(
    ours: Mapping[str, Array], theirs: Mapping[str, Array], location: RunPosition
) -> Mismatch | None:
    for name in sorted(ours.keys() | theirs.keys()):
        expected = f"shape {list(ours[name].shape)}" if name in ours else "no such tensor"
        found = f"shape {list(theirs[name].shape)}" if name in theirs else "no such tensor"
        if expected != found:
            return Mismatch(location=location, tensor=name, expected=expected, found=found)
    return None


def _describe_result(result: ResultRecord | None) -> str:
    match result:
        case JobCalled():
            return f"call {result.call} of {result.job}"
        case StepRecorded():
            return f"step {result.step}, by {result.job}"
        case ModelRegistered():
            return f"the model {result.model}"
    return "the end of the script"


def format_result_name(job: str, path: str) -> str:
    """Return the name of a result in words."""
    return f"result {path} of {job}" if path else f"result of {job}"


def _describe_state(state: TensorState) -> str:
    return f"{state.dtype} of {state.size} elements, {'with' if state.gradient else 'without'} gradient"


def _find_largest_result(call: JobCalled) -> float:
    """Return the largest absolute floating-point number of a call's results."""
    return max((find_largest(to_array(leaf)) for leaf in call.leaves if not leaf.is_integer), default=0.0)


def _compare_results(
    ours: JobCalled, theirs: JobCalled, location: RunPosition, largest_result: float
) -> Iterator[Difference]:
    """Yield the differences of a call's results.

    In float64 a result may be zero but for rounding, as a difference of numbers as large as `largest_result`. In a
    lower precision such a rounding error could be a fault, so the runs in float64 decide.
    """
    for expected, found in zip(ours.leaves, theirs.leaves, strict=True):
        first, second = to_array(expected), to_array(found)
        yield Difference(
            location=location,
            kind="result",
            tensor=format_result_name(ours.job, expected.path),
            dtype=expected.dtype,
            size=_compute_leaf_distance(expected, first, second),
            scale=find_largest(first),
            resolution=RESOLUTION["float64"] * largest_result if expected.dtype in ("float64", "complex128") else 0.0,
            count=_count_elements(expected, first),
            largest=largest_result,
            is_integer_result=expected.is_integer,
        )


def compare_states(
    ours: Sequence[TensorState],
    theirs: Sequence[TensorState],
    location: RunPosition,
    paths: TravelledDistances,
) -> Iterator[Difference]:
    """Yield the differences of states, gradients first: if both differ, the gradient is the cause."""
    for kind in ("gradient", "parameter"):
        pairs = [
            (first, a, b)
            for first, second in zip(ours, theirs, strict=True)
            for a, b in [(_get_summary(first, kind), _get_summary(second, kind))]
            if a is not None and b is not None
        ]
        norms = [a.norm for state, a, _ in pairs if state.dtype in RESOLUTION and math.isfinite(a.norm)]
        largest = max(norms, default=0.0)
        for state, a, b in pairs:
            yield Difference(
                location=location,
                kind="gradient" if kind == "gradient" else "parameter",
                tensor=f"gradient of {state.name}" if kind == "gradient" else state.name,
                dtype=state.dtype,
                size=compute_sketch_distance(a, b),
                scale=a.norm if math.isfinite(a.norm) else 0.0,
                resolution=RESOLUTION.get(state.dtype, 0.0) * largest,
                count=state.size,
                path=paths.longest(state.name),
                largest=largest if kind == "gradient" else 0.0,
            )


def _compare_final_tensors(
    one: Recording, other: Recording, location: RunPosition, paths: TravelledDistances
) -> Iterator[Difference]:
    rounded = [one.tensors[final.name] for final in one.described if final.dtype in RESOLUTION]
    largest = max(map(find_largest, rounded), default=0.0)
    for final in one.described:
        first = one.tensors[final.name]
        yield Difference(
            location=location,
            kind="final",
            tensor=final.name,
            dtype=final.dtype,
            size=compute_distance(first, other.tensors[final.name]),
            scale=find_largest(first),
            resolution=RESOLUTION.get(final.dtype, 0.0) * largest,
            count=first.size,
            path=paths.longest(final.name),
        )


def _get_summary(state: TensorState, kind: str) -> TensorSummary | None:
    return state.gradient if kind == "gradient" else state.value


def compute_distance(first: Array, second: Array) -> float:
    """Return the largest difference of two elements. Equal infinities and equal nans do not differ."""
    if np.array_equal(first, second, equal_nan=first.dtype.kind == "f"):
        return 0.0
    with np.errstate(invalid="ignore"):
        difference = np.abs(first.astype(np.float64) - second.astype(np.float64))
    difference = np.where((first == second) | (np.isnan(first) & np.isnan(second)), 0.0, difference)
    return math.inf if not np.isfinite(difference).all() else float(difference.max())


def _compute_leaf_distance(leaf: Leaf, first: Array, second: Array) -> float:
    if leaf.is_integer and first.size > 1:
        return float((first != second).sum())
    return compute_distance(first, second)


def compute_sketch_distance(first: TensorSummary, second: TensorSummary) -> float:
    """Return the approximate Euclidean distance of two tensors from their sketches."""
    if first == second or (math.isnan(first.norm) and math.isnan(second.norm)):
        return 0.0
    difference = math.dist(first.sketch, second.sketch)
    return difference if math.isfinite(difference) else math.inf


def find_largest(tensor: Array) -> float:
    """Return the largest absolute finite element, or 0 for an empty tensor."""
    finite = np.abs(tensor[np.isfinite(tensor)])
    return float(finite.max()) if finite.size else 0.0


def _count_elements(leaf: Leaf, values: Array) -> int:
    """Return how many units rounding could flip: the elements of a tensor, or the value of a single integer."""
    return max(1, int(find_largest(values))) if leaf.is_integer and values.size == 1 else int(values.size)
