"""A script's recording beside that of its plain twin, which knows no jobs: matched step by step.

# Note [which tensor is which]: a twin's tensors are matched with the script's by size, first value and name. Of what is
# alike in size and first value (biases that begin at zero) the one of the same name is taken, else the next in order.
# What begins otherwise is matched by name, else by order, and its first value is the first difference.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from rankless.records.job_results import Called, Registered, Stepped, TensorState
from rankless.verify.comparison import Comparison, Finding, loss_leaf, measured_row
from rankless.verify.differences import (
    RESOLUTION,
    Difference,
    Mismatch,
    Place,
    distance,
    largest_of,
    measure,
    of_states,
    place_of,
    result_name,
    sketch_distance,
)
from rankless.verify.recordings import Recording, array_of
from rankless.verify.tolerance import ROUNDING_BOUND, NoiseFloor


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One step of a recording: the calls that led to it, and where each stands among the results."""

    calls: tuple[tuple[int, Called], ...]
    position: int
    stepped: Stepped


@dataclass(frozen=True, kw_only=True)
class ReferenceRun:
    """The plain script's name and recording."""

    name: str
    recording: Recording


def with_twin(
    comparison: Comparison, twin: ReferenceRun, one: Recording, many: Sequence[Recording], noise: Sequence[Recording]
) -> Comparison:
    """The comparison with what sets the script, on one worker and on several, apart from its twin."""
    tolerance = None if comparison.tolerance is None else comparison.tolerance.tolerance
    allowance = NoiseFloor([measure(one, repetition)[0] for repetition in noise], tolerance=tolerance)
    findings: list[Finding] = []
    found: list[Difference] = []
    for recording, who in [(one, "1 worker"), *((recording, f"rank {recording.rank}") for recording in many)]:
        differences, mismatch = measure_twin(twin.recording, recording)
        found += differences
        findings += _beyond(differences, mismatch, allowance, twin.name, who)
    findings = sorted([*comparison.findings, *findings], key=lambda finding: finding.place.position)
    row = measured_row(f"against {twin.name}", found, allowance)
    return replace(comparison, findings=tuple(findings), rows=(*comparison.rows, row))


def _beyond(
    differences: Sequence[Difference], mismatch: Mismatch | None, allowance: NoiseFloor, name: str, who: str
) -> Iterator[Finding]:
    for item in differences:
        limit = allowance.limit(item)
        if not item.size <= limit:
            yield Finding(
                place=item.place,
                tensor=item.tensor,
                expected=f"at most {limit:.3g} from {name} (noise {allowance.noise(item):.3g})",
                found=f"{item.size:.3g} on {who}",
                cause="values",
                is_of_twin=True,
            )
            break
    if mismatch is not None:
        yield Finding(
            place=mismatch.place,
            tensor=mismatch.tensor,
            expected=f"{mismatch.expected}, as in {name}",
            found=f"{mismatch.found}, on {who}",
            cause="structure",
            is_of_twin=True,
        )


def measure_twin(twin: Recording, script: Recording) -> tuple[list[Difference], Mismatch | None]:
    """All differences of a script from its twin up to the first mismatch, under the script's names; and that."""
    ours, theirs = training_steps(twin), training_steps(script)
    first_ours, first_theirs = first_states(twin), first_states(script)
    names = matched(first_ours, first_theirs)
    initial = {names[name]: state.value for name, state in first_ours.items() if name in names}
    beginning = Place(position=0, step=0, line="")
    begun = [name for name in first_ours if name in names]
    differences = list(
        of_states(
            [without_gradient(first_ours[name], names[name]) for name in begun],
            [without_gradient(first_theirs[names[name]], names[name]) for name in begun],
            beginning,
            initial,
        )
    )
    for number in range(max(len(ours), len(theirs))):
        if number >= len(ours) or number >= len(theirs):
            last = Place(
                position=theirs[number].position if number < len(theirs) else len(script.results),
                step=number + 1,
                line="",
            )
            texts = [f"{len(steps)} steps" for steps in (ours, theirs)]
            return differences, Mismatch(place=last, tensor="the steps", expected=texts[0], found=texts[1])
        place = place_of(script, theirs[number].position)
        pairs = paired_states(ours[number].stepped, theirs[number].stepped, names)
        if isinstance(pairs, str):
            return differences, Mismatch(place=place, tensor=pairs, expected="to be trained by this step", found="not")
        differences += loss_difference(ours[number], theirs[number], script)
        differences += of_states([a for a, _ in pairs], [b for _, b in pairs], place, initial)
    differences += final_differences(twin, script, names)
    return differences, None


def training_steps(recording: Recording) -> list[TrainingStep]:
    """The steps of a recording, in order."""
    steps: list[TrainingStep] = []
    calls: list[tuple[int, Called]] = []
    for position, result in enumerate(recording.results):
        if isinstance(result, Called):
            calls.append((position, result))
        elif isinstance(result, Stepped):
            own = tuple((place, call) for place, call in calls if call.job == result.job)
            steps.append(TrainingStep(calls=own, position=position, stepped=result))
            calls = [(place, call) for place, call in calls if call.job != result.job]
    return steps


def first_states(recording: Recording) -> dict[str, TensorState]:
    """Every tensor as it was when it became known."""
    registered = [result for result in recording.results if isinstance(result, Registered)]
    return {state.name: state for result in registered for state in result.tensors}


def matched(ours: Mapping[str, TensorState], theirs: Mapping[str, TensorState]) -> dict[str, str]:
    """Which of their tensors each of ours is; see Note [which tensor is which]."""
    names: dict[str, str] = {}
    free = dict(theirs)
    for by_value, by_name in ((True, True), (True, False), (False, True), (False, False)):
        for name, state in ours.items():
            if name in names:
                continue
            for other_name, other in free.items():
                alike = not by_value or begins_alike(state, other)
                if state.size == other.size and alike and (not by_name or path(name) == path(other_name)):
                    names[name] = other_name
                    del free[other_name]
                    break
    return names


def path(name: str) -> str:
    """A tensor's name inside its model."""
    return name.partition(".")[2]


def begins_alike(state: TensorState, other: TensorState) -> bool:
    """Whether two tensors are the same but for rounding when they become known."""
    return sketch_distance(state.value, other.value) <= ROUNDING_BOUND.get(state.dtype, 0.0) * state.value.norm


def without_gradient(state: TensorState, name: str) -> TensorState:
    """A state under another name, its gradient left out."""
    return msgspec.structs.replace(state, name=name, gradient=None)


def paired_states(
    ours: Stepped, theirs: Stepped, names: Mapping[str, str]
) -> list[tuple[TensorState, TensorState]] | str:
    """The states of a step in pairs, under the script's names; or the name of a tensor that has no partner."""
    known = {state.name: state for state in theirs.tensors}
    pairs = []
    for state in ours.tensors:
        other = known.get(names.get(state.name, ""))
        if other is None:
            return names.get(state.name, f"{state.name} of the twin")
        ours_now, theirs_now = msgspec.structs.replace(state, name=other.name), other
        if has_gradient(ours_now) != has_gradient(theirs_now):
            return f"gradient of {other.name}"
        if not has_gradient(ours_now):
            # Zeros in one script, nothing in the other (zero_grad keeps or drops them): both are no gradient.
            ours_now, theirs_now = (without_gradient(item, other.name) for item in (ours_now, theirs_now))
        pairs.append((ours_now, theirs_now))
    return pairs


def has_gradient(state: TensorState) -> bool:
    """Whether there is a gradient that is not zero throughout."""
    return state.gradient is not None and state.gradient.norm != 0


def loss_difference(ours: TrainingStep, theirs: TrainingStep, script: Recording) -> Iterator[Difference]:
    """The loss of a step; the twin's is the sum of what was propagated back. Of accumulated steps none is compared."""
    roots = [float(array_of(leaf).sum()) for _, call in ours.calls for leaf in call.leaves]
    if len(theirs.calls) != 1 or not roots:
        return
    position, call = theirs.calls[0]
    leaf = loss_leaf(call)
    if leaf is None:
        return
    values = array_of(leaf)
    loss = float(values.mean()) if values.size else math.nan
    total = sum(roots)
    equal = total == loss or (math.isnan(total) and math.isnan(loss))
    apart = 0.0 if equal else abs(total - loss)
    yield Difference(
        place=place_of(script, position),
        kind="result",
        tensor=result_name(call.job, leaf.path),
        dtype=leaf.dtype,
        size=apart if math.isfinite(apart) else math.inf,
        scale=abs(total) if math.isfinite(total) else 0.0,
        resolution=0.0,
        count=1,
    )


def final_differences(twin: Recording, script: Recording, names: Mapping[str, str]) -> Iterator[Difference]:
    """Parameters and buffers at the end, whole."""
    place = Place(position=len(script.results), step=script.steps, line="")
    begun = {name: state.value for name, state in first_states(twin).items()}
    last = {state.name: state.value for step in training_steps(twin) for state in step.stepped.tensors}
    largest = max((largest_of(tensor) for tensor in twin.tensors.values()), default=0.0)
    for final in twin.described:
        name = names.get(final.name)
        if name is None or name not in script.tensors or twin.tensors[final.name].size == 0:
            continue
        ours = twin.tensors[final.name].reshape(-1)
        yield Difference(
            place=place,
            kind="final",
            tensor=name,
            dtype=final.dtype,
            size=distance(ours, script.tensors[name].reshape(-1)),
            scale=largest_of(ours),
            resolution=RESOLUTION.get(final.dtype, 0.0) * largest,
            count=ours.size,
            motion=sketch_distance(begun[final.name], last[final.name]) if final.name in last else 0.0,
        )
