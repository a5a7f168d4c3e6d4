"""Compare a script's recording with that of a plain reference script, which calls no job, step by step.

Note [which tensor is which]: tensors of the reference and of the script are matched by size, first value and name.
Among tensors of equal size and first value, such as biases that begin at zero, the one with the same name matches, else
the next in order. A tensor with another first value is matched by name, else by order, and its first value is the first
difference. Models may be equal at first, such as a student and a frozen copy of it. So what both scripts train is
matched first, and shows which model is which. Everything else is matched within these models before it is across them.

Note [first values]: a script's models are recorded when its first job is called, those of the reference at their first
forward. Between the two a script may set a parameter, as weight clipping does. So a first value is no difference if all
later values and gradients of its tensor agree.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import msgspec

from rankless.records.verify_recording_format import (
    JobCalled,
    ModelRegistered,
    StepRecorded,
    TensorState,
    TensorSummary,
)
from rankless.verify.differences import (
    RESOLUTION,
    Difference,
    Mismatch,
    RunPosition,
    TravelledDistances,
    compare_states,
    compute_distance,
    compute_sketch_distance,
    find_largest,
    format_result_name,
    locate,
    measure,
)
from rankless.verify.differences_beyond_tolerance import (
    Comparison,
    Divergence,
    find_first_excess,
    find_loss_leaf,
    make_row,
)
from rankless.verify.noise_floor import ALL_ROUNDING_ERRORS, ROUNDING_BOUND, NoiseFloor
from rankless.verify.read_and_combine_recordings import Recording, take_beginning, to_array


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One step of a recording: its calls with their positions among the results."""

    calls: tuple[tuple[int, JobCalled], ...]
    position: int
    stepped: StepRecorded


@dataclass(frozen=True, kw_only=True)
class TensorStart:
    """A parameter or buffer when it was registered."""

    state: TensorState
    is_trained: bool

    @property
    def model(self) -> str:
        """The name of its model."""
        return self.state.name.partition(".")[0]

    @property
    def path(self) -> str:
        """Its name inside its model."""
        return self.state.name.partition(".")[2]


@dataclass(frozen=True, kw_only=True)
class Match:
    """What two tensors of equal size must have in common to be the same one."""

    is_trained: bool = False
    start: bool = True
    path: bool = True
    models: bool = False

    def holds(self, ours: TensorStart, theirs: TensorStart, models: Collection[tuple[str, str]]) -> bool:
        """Whether two tensors match. `models` has the pairs of models of the tensors that are matched already."""
        return (
            ours.state.size == theirs.state.size
            and (not self.is_trained or (ours.is_trained and theirs.is_trained))
            and (not self.path or ours.path == theirs.path)
            and (not self.models or (ours.model, theirs.model) in models)
            and (not self.start or has_same_start(ours.state, theirs.state))
        )


MATCHES = (
    Match(is_trained=True),
    Match(is_trained=True, path=False),
    *(
        Match(start=start, path=path, models=models)
        for start, path, models in product((True, False), (True, False), (True, False))
    ),
)
"""In the order in which they are tried."""


@dataclass(frozen=True, kw_only=True)
class ReferenceRun:
    """The reference script's name and recording."""

    name: str
    recording: Recording


def compare_with_reference(
    comparison: Comparison,
    reference: ReferenceRun,
    one: Recording,
    many: Sequence[Recording],
    noise: Sequence[Recording],
) -> Comparison:
    """Return the comparison extended by differences of the script, on one and several workers, from the reference."""
    tolerance = None if comparison.tolerance is None else comparison.tolerance.tolerance
    repeated = [measure(take_beginning(one, repetition), repetition)[0] for repetition in noise]
    noise_floor = NoiseFloor(repeated, tolerance=tolerance)
    findings: list[Divergence] = []
    found: list[Difference] = []
    for recording, run_name in [(one, "1 worker"), *((recording, f"rank {recording.rank}") for recording in many)]:
        differences, mismatch = measure_reference(reference.recording, recording)
        differences = drop_overwritten_first_values(differences, noise_floor)
        found += differences
        findings += _check_limits(differences, mismatch, noise_floor, reference.name, run_name)
    findings = sorted([*comparison.findings, *findings], key=lambda finding: finding.location.position)
    row = make_row(f"against {reference.name}", found, noise_floor)
    return replace(comparison, findings=tuple(findings), rows=(*comparison.rows, row))


def drop_overwritten_first_values(differences: Sequence[Difference], noise_floor: NoiseFloor) -> list[Difference]:
    """Return the differences without first values that no step has used; see Note [first values]."""
    compared_later: set[str] = set()
    differs_later: set[str] = set()
    for item in differences:
        if item.location.step > 0:
            name = item.tensor.removeprefix("gradient of ")
            compared_later.add(name)
            if not item.size <= noise_floor.limit(item):
                differs_later.add(name)
    agree_later = compared_later - differs_later
    return [
        item
        for item in differences
        if item.location.step > 0 or item.tensor not in agree_later or item.size <= noise_floor.limit(item)
    ]


def _check_limits(
    differences: Sequence[Difference], mismatch: Mismatch | None, noise_floor: NoiseFloor, name: str, run_name: str
) -> Iterator[Divergence]:
    for found in find_first_excess(differences, noise_floor, name, run_name):
        yield replace(found, is_of_reference=True)
    if mismatch is not None:
        yield Divergence(
            location=mismatch.location,
            tensor=mismatch.tensor,
            expected=f"{mismatch.expected}, as in {name}",
            found=f"{mismatch.found}, on {run_name}",
            cause="structure",
            is_of_reference=True,
        )


def measure_reference(reference: Recording, script: Recording) -> tuple[list[Difference], Mismatch | None]:
    """Return all differences of a script from its reference up to the first mismatch, and that mismatch.

    Both use the script's names of tensors.
    """
    ours, theirs = list_training_steps(reference), list_training_steps(script)
    first_ours, first_theirs = get_first_states(reference), get_first_states(script)
    names = match_tensors(list_starts(reference), list_starts(script))
    paths = TravelledDistances()
    beginning = RunPosition(position=0, step=0, line="")
    first_values = [name for name in first_ours if name in names]
    begun_ours = [drop_gradient(first_ours[name], names[name]) for name in first_values]
    begun_theirs = [drop_gradient(first_theirs[names[name]], names[name]) for name in first_values]
    paths.add(begun_ours, begun_theirs)
    differences = list(compare_states(begun_ours, begun_theirs, beginning, paths))
    for number in range(max(len(ours), len(theirs))):
        if number >= len(ours) or number >= len(theirs):
            last = RunPosition(
                position=theirs[number].position if number < len(theirs) else len(script.results),
                step=number + 1,
                line="",
            )
            texts = [f"{len(steps)} steps" for steps in (ours, theirs)]
            return differences, Mismatch(location=last, tensor="the steps", expected=texts[0], found=texts[1])
        location = locate(script, theirs[number].position)
        pairs = pair_states(ours[number].stepped, theirs[number].stepped, names)
        if isinstance(pairs, str):
            return differences, Mismatch(
                location=location, tensor=pairs, expected="to be trained by this step", found="not"
            )
        differences += compare_loss(ours[number], theirs[number], script)
        stepped_ours, stepped_theirs = [a for a, _ in pairs], [b for _, b in pairs]
        paths.add(stepped_ours, stepped_theirs)
        differences += compare_states(stepped_ours, stepped_theirs, location, paths)
    differences += compare_final(reference, script, names, paths)
    return differences, None


def list_training_steps(recording: Recording) -> list[TrainingStep]:
    """Return the steps of a recording in order."""
    steps: list[TrainingStep] = []
    calls: list[tuple[int, JobCalled]] = []
    for position, result in enumerate(recording.results):
        if isinstance(result, JobCalled):
            calls.append((position, result))
        elif isinstance(result, StepRecorded):
            own = tuple((position, call) for position, call in calls if call.job == result.job)
            steps.append(TrainingStep(calls=own, position=position, stepped=result))
            calls = [(position, call) for position, call in calls if call.job != result.job]
    return steps


def get_first_states(recording: Recording) -> dict[str, TensorState]:
    """Return every tensor's state when it was registered."""
    registered = [result for result in recording.results if isinstance(result, ModelRegistered)]
    return {state.name: state for result in registered for state in result.tensors}


def list_starts(recording: Recording) -> list[TensorStart]:
    """Return every tensor of a recording as it was registered, and whether any step trains it."""
    steps = [result for result in recording.results if isinstance(result, StepRecorded)]
    trained = {state.name for step in steps for state in step.tensors if has_gradient(state)}
    return [TensorStart(state=state, is_trained=name in trained) for name, state in get_first_states(recording).items()]


def match_tensors(ours: Sequence[TensorStart], theirs: Sequence[TensorStart]) -> dict[str, str]:
    """Return which of their tensors each of ours is; see Note [which tensor is which]."""
    matched: dict[str, TensorStart] = {}
    free = {start.state.name: start for start in theirs}
    for match in MATCHES:
        models = {(start.model, matched[start.state.name].model) for start in ours if start.state.name in matched}
        for start in ours:
            if start.state.name in matched:
                continue
            partner = next((other for other in free.values() if match.holds(start, other, models)), None)
            if partner is not None:
                matched[start.state.name] = free.pop(partner.state.name)
    return {name: partner.state.name for name, partner in matched.items()}


def has_same_start(state: TensorState, other: TensorState) -> bool:
    """Whether two tensors were equal up to rounding when they were registered."""
    return compute_sketch_distance(state.value, other.value) <= ROUNDING_BOUND.get(state.dtype, 0.0) * state.value.norm


def drop_gradient(state: TensorState, name: str) -> TensorState:
    """Return a state under another name, without its gradient."""
    return msgspec.structs.replace(state, name=name, gradient=None)


def pair_states(
    ours: StepRecorded, theirs: StepRecorded, names: Mapping[str, str]
) -> list[tuple[TensorState, TensorState]] | str:
    """Return the states of a step in pairs, under the script's names; or the name of an unmatched tensor."""
    known = {state.name: state for state in theirs.tensors}
    largest = max((get_gradient_norm(state) for state in ours.tensors), default=0.0)
    pairs = []
    for state in ours.tensors:
        all_rounding = ALL_ROUNDING_ERRORS * RESOLUTION.get(state.dtype, 0.0) * largest
        other = known.get(names.get(state.name, ""))
        if other is None:
            return names.get(state.name, f"{state.name} of the reference")
        ours_now, theirs_now = msgspec.structs.replace(state, name=other.name), other
        if has_gradient(ours_now) != has_gradient(theirs_now):
            # A gradient that is all rounding, as of a bias before a softmax, may be exactly zero in one script.
            if max(get_gradient_norm(ours_now), get_gradient_norm(theirs_now)) > all_rounding:
                return f"gradient of {other.name}"
            ours_now, theirs_now = fill_gradient(ours_now, theirs_now), fill_gradient(theirs_now, ours_now)
        elif not has_gradient(ours_now):
            # zero_grad leaves zeros or None. Both mean no gradient.
            ours_now, theirs_now = (drop_gradient(item, other.name) for item in (ours_now, theirs_now))
        pairs.append((ours_now, theirs_now))
    return pairs


def get_gradient_norm(state: TensorState) -> float:
    """Return the norm of a gradient, which is zero if there is none."""
    return 0.0 if state.gradient is None else state.gradient.norm


def fill_gradient(state: TensorState, other: TensorState) -> TensorState:
    """Return a state with a gradient of zeros if it has none and the other has one."""
    if state.gradient is not None or other.gradient is None:
        return state
    zeros = TensorSummary(norm=0.0, sketch=(0.0,) * len(other.gradient.sketch))
    return msgspec.structs.replace(state, gradient=zeros)


def has_gradient(state: TensorState) -> bool:
    """Whether there is a gradient other than zero."""
    return state.gradient is not None and state.gradient.norm != 0


def compare_loss(ours: TrainingStep, theirs: TrainingStep, script: Recording) -> Iterator[Difference]:
    """Yield the difference of a step's losses.

    The reference's loss is the sum of all tensors on which it called `backward`. Accumulated steps are not
    compared.
    """
    roots = [float(to_array(leaf).sum()) for _, call in ours.calls for leaf in call.leaves]
    if len(theirs.calls) != 1 or not roots:
        return
    position, call = theirs.calls[0]
    leaf = find_loss_leaf(call)
    if leaf is None:
        return
    values = to_array(leaf)
    loss = float(values.mean()) if values.size else math.nan
    total = sum(roots)
    equal = total == loss or (math.isnan(total) and math.isnan(loss))
    difference = 0.0 if equal else abs(total - loss)
    yield Difference(
        location=locate(script, position),
        kind="result",
        tensor=format_result_name(call.job, leaf.path),
        dtype=leaf.dtype,
        size=difference if math.isfinite(difference) else math.inf,
        scale=abs(total) if math.isfinite(total) else 0.0,
        resolution=0.0,
        count=1,
    )


def compare_final(
    reference: Recording, script: Recording, names: Mapping[str, str], paths: TravelledDistances
) -> Iterator[Difference]:
    """Yield the differences of parameters and buffers at the end."""
    location = RunPosition(position=len(script.results), step=script.steps, line="")
    largest = max((find_largest(tensor) for tensor in reference.tensors.values()), default=0.0)
    for final in reference.described:
        name = names.get(final.name)
        if name is None or name not in script.tensors or reference.tensors[final.name].size == 0:
            continue
        ours = reference.tensors[final.name].reshape(-1)
        yield Difference(
            location=location,
            kind="final",
            tensor=name,
            dtype=final.dtype,
            size=compute_distance(ours, script.tensors[name].reshape(-1)),
            scale=find_largest(ours),
            resolution=RESOLUTION.get(final.dtype, 0.0) * largest,
            count=ours.size,
            path=paths.longest(name),
        )
