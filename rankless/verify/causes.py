"""Why a script that divides its own data trains otherwise on N ranks: the commonest causes.

Each rule looks at what was recorded of the step where the runs part: the rows that the ranks read, their learning
rates, their gradients, the kinds of layers of the model. The first rule that holds names the cause. A script that parts
from its plain reference is asked one question only: whether the models of both got the same rows.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from rankless.records.verify_recording_format import ModelRegistered
from rankless.verify.comparison_with_reference_script import ReferenceRun, list_training_steps
from rankless.verify.differences import compute_sketch_distance
from rankless.verify.differences_beyond_tolerance import Divergence
from rankless.verify.noise_floor import ROUNDING_BOUND
from rankless.verify.read_and_combine_recordings import ForeignStep, Recording, list_steps

CauseName = Literal[
    "different initial parameters",
    "undivided data",
    "whole batch on every rank",
    "learning rate",
    "padded last batch",
    "dropped samples",
    "other samples",
    "gradients not reduced",
    "gradients summed",
    "mean of means",
    "batch norm per rank",
    "dropout per rank",
    "other inputs",
]
EVEN_BATCHES = "choose a batch size that divides the data set, or drop the last batch on one worker and on ranks alike"
CLOSE = 1e-3
"""How far a measured ratio, such as that of two gradients, may lie from the number that a rule expects."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why the runs part."""

    name: CauseName
    text: str
    """What happens, in one sentence."""
    fix: str


@dataclass(frozen=True, kw_only=True)
class PartingStep:
    """The step at which the runs part: on one worker, and on each rank."""

    number: int
    one: ForeignStep
    ranks: Sequence[ForeignStep]
    start: Sequence[Recording]
    """All recordings, of one worker and of every rank, for where they begin."""
    layers: Sequence[str]
    was_divided: bool
    """Whether the ranks divided the rows of one worker in a step before this one."""

    @property
    def rows_one(self) -> int:
        """The rows of the batch on one worker."""
        return self.one.rows

    @property
    def rows(self) -> list[int]:
        """The rows of each rank."""
        return [rank.rows for rank in self.ranks]

    @property
    def samples(self) -> Counter[int]:
        """The digests of all ranks' rows."""
        return Counter(sample for rank in self.ranks for sample in rank.inputs.samples)


CERTAIN: frozenset[CauseName] = frozenset(
    {
        "undivided data",
        "whole batch on every rank",
        "learning rate",
        "padded last batch",
        "dropped samples",
        "other samples",
    }
)
"""Causes in what the ranks read or were told, not in numbers that they computed: no rounding explains them."""


def find_cause(finding: Divergence, one: Recording, many: Sequence[Recording]) -> Cause | None:
    """Return the cause of the first finding, or None if no rule holds."""
    steps, ranks = list_steps(one), [list_steps(recording) for recording in many]
    common = min([len(steps), *map(len, ranks)])
    if not common:
        return None
    index = min(max(finding.location.step, 1), common) - 1
    parting = PartingStep(
        number=index + 1,
        one=steps[index],
        ranks=[rank[index] for rank in ranks],
        start=[one, *many],
        layers=one.survey.layers,
        was_divided=any(
            0 < step.rows == sum(rank[number].rows for rank in ranks) for number, step in enumerate(steps[:index])
        ),
    )
    for rule in RULES:
        cause = rule(parting)
        if cause is not None:
            return cause
    return None


def find_other_inputs(finding: Divergence, reference: ReferenceRun, one: Recording) -> Cause | None:
    """Return the cause "other inputs" if the script's models got other rows than the reference's, up to the finding."""
    steps = zip(list_training_steps(reference.recording), list_training_steps(one), strict=False)
    for number, (ours, theirs) in enumerate(steps, 1):
        if number > finding.location.step:
            return None
        expected, found = (
            Counter(() if step.stepped.inputs is None else step.stepped.inputs.samples) for step in (ours, theirs)
        )
        if not expected or not found or expected == found:
            continue
        if expected.total() != found.total():
            return Cause(
                name="other inputs",
                text=f"step {number} trains on {expected.total()} rows in {reference.name} and on {found.total()} here",
                fix="give both scripts the same batch size, and the same treatment of the last batch",
            )
        return Cause(
            name="other inputs",
            text=f"in step {number} {(expected - found).total()} of {expected.total()} rows that the model gets are "
            f"others than in {reference.name}",
            fix='if the data set transforms its samples at random, pass reading="replicated" to rankless.loader, which '
            "then draws as one process does; else give both scripts the same order, seeds and preprocessing",
        )
    return None


def find_undivided(one: Recording, many: Sequence[Recording]) -> Cause | None:
    """Return the cause "undivided data" if all ranks read all samples of the run on one worker in every step."""
    steps, ranks = list_steps(one), [list_steps(recording) for recording in many]
    together = list(zip(steps, *ranks, strict=False))
    if len(many) < 2 or not together or not any(step[0].inputs.samples for step in together):
        return None
    if all(len({tuple(sorted(item.inputs.samples)) for item in step}) == 1 for step in together):
        return _make_undivided(len(many))
    return None


def _make_undivided(ranks: int) -> Cause:
    return Cause(
        name="undivided data",
        text=f"every one of the {ranks} ranks reads the same samples, so they repeat one training {ranks} times",
        fix="divide the data: a DistributedSampler, or the framework's function that prepares a loader",
    )


def _check_start(parting: PartingStep) -> Cause | None:
    """Whether ranks begin with other parameters than rank 0, and no framework has made them equal at this step."""
    begins = [
        {
            state.name: state.value
            for result in recording.results
            if isinstance(result, ModelRegistered)
            for state in result.tensors
        }
        for recording in parting.start[1:]
    ]
    differing = [
        rank
        for rank, begin in enumerate(begins)
        if any(
            compute_sketch_distance(value, begin.get(name, value)) > CLOSE * value.norm
            for name, value in begins[0].items()
        )
    ]
    if not differing or not _ranks_differ(parting):
        return None
    return Cause(
        name="different initial parameters",
        text=f"rank {differing[0]} begins with other parameters than rank 0",
        fix="broadcast them from rank 0 (hvd.broadcast_parameters; DistributedDataParallel does), or seed ranks alike",
    )


def _ranks_differ(parting: PartingStep) -> bool:
    """Whether ranks have different parameters after the step."""
    first = {state.name: state for state in parting.ranks[0].stepped.tensors if state.gradient is not None}
    return any(
        compute_sketch_distance(first[state.name].value, state.value)
        > ROUNDING_BOUND.get(state.dtype, 0.0) * state.value.norm
        for rank in parting.ranks[1:]
        for state in rank.stepped.tensors
        if state.name in first
    )


def _check_undivided(parting: PartingStep) -> Cause | None:
    samples = {tuple(sorted(rank.inputs.samples)) for rank in parting.ranks}
    known = len(parting.ranks) > 1 and parting.ranks[0].inputs.samples and not parting.was_divided
    return _make_undivided(len(parting.ranks)) if known and len(samples) == 1 else None


def _check_whole_batches(parting: PartingStep) -> Cause | None:
    count = len(parting.ranks)
    if count < 2 or not parting.rows_one or any(rows != parting.rows_one for rows in parting.rows):
        return None
    if parting.was_divided or set(parting.samples) <= set(parting.one.inputs.samples) != set():
        return None  # a small batch that was padded for each rank may have as many rows
    total = sum(parting.rows)
    return Cause(
        name="whole batch on every rank",
        text=f"each rank reads a whole batch of {parting.rows_one} rows, so the batch of {count} ranks has {total}",
        fix=f"divide batch_size by the number of ranks: {parting.rows_one} // {count} rows for each rank",
    )


def _check_learning_rate(parting: PartingStep) -> Cause | None:
    ours, theirs = parting.one.inputs.learning_rates, parting.ranks[0].inputs.learning_rates
    if len(ours) != len(theirs) or all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(ours, theirs, strict=True)):
        return None
    first, second = next((a, b) for a, b in zip(ours, theirs, strict=True) if not math.isclose(a, b, rel_tol=1e-6))
    scale = f", {second / first:.3g} times as much" if first else ""
    return Cause(
        name="learning rate",
        text=f"the learning rate is {first:g} on one worker and {second:g} on {len(parting.ranks)} ranks{scale}",
        fix="do not scale the learning rate by the number of ranks if the whole batch stays the same",
    )


def _check_samples(parting: PartingStep) -> Cause | None:
    ours, theirs = Counter(parting.one.inputs.samples), parting.samples
    if not ours or not theirs or ours == theirs:
        return None
    extra, missing = (theirs - ours).total(), (ours - theirs).total()
    if not missing and extra:
        return Cause(
            name="padded last batch",
            text=f"the ranks read {extra} samples besides the {ours.total()} of this step, so that all get as many",
            fix=EVEN_BATCHES,
        )
    if missing and not extra:
        return Cause(
            name="dropped samples",
            text=f"the ranks leave out {missing} of the {ours.total()} samples of this step",
            fix=EVEN_BATCHES,
        )
    return Cause(
        name="other samples",
        text=f"{missing} of the {ours.total()} samples of this step are others than on one worker",
        fix="give samplers the same seed on every rank and on one worker, call set_epoch, and take every N-th index",
    )


def _check_gradients(parting: PartingStep) -> Cause | None:
    count = len(parting.ranks)
    ours = {state.name: state.gradient for state in parting.one.stepped.tensors if state.gradient is not None}
    summed = separate = 0
    for state in parting.ranks[0].stepped.tensors:
        expected = ours.get(state.name)
        if expected is None or state.gradient is None or expected.norm == 0:
            continue
        scaled = [count * number for number in expected.sketch]
        summed += math.dist(scaled, state.gradient.sketch) < CLOSE * count * expected.norm
        separate += 1
    if separate and summed == separate and count > 1:
        return Cause(
            name="gradients summed",
            text=f"the gradients are {count} times those of one worker: they are summed over the ranks",
            fix="average them: divide by the number of ranks, or use the framework's average",
        )
    if _gradients_differ(parting):
        return Cause(
            name="gradients not reduced",
            text="every rank steps with its own gradients, so the ranks train apart",
            fix="wrap the model (DistributedDataParallel, fabric.setup, accelerator.prepare) or the optimizer "
            "(hvd.DistributedOptimizer), and call backward through the framework",
        )
    return None


def _gradients_differ(parting: PartingStep) -> bool:
    first = {state.name: state.gradient for state in parting.ranks[0].stepped.tensors if state.gradient is not None}
    return any(
        compute_sketch_distance(first[state.name], state.gradient) > CLOSE * state.gradient.norm
        for rank in parting.ranks[1:]
        for state in rank.stepped.tensors
        if state.gradient is not None and state.name in first
    )


def _check_means(parting: PartingStep) -> Cause | None:
    if len(set(parting.rows)) < 2:
        return None
    return Cause(
        name="mean of means",
        text=f"the ranks have {', '.join(map(str, parting.rows))} rows, and each rank's mean counts alike",
        fix="weigh each rank's loss by its rows, or choose a batch size that divides evenly",
    )


def _check_layers(parting: PartingStep) -> Cause | None:
    norms = [layer for layer in parting.layers if layer.startswith("BatchNorm")]
    if norms:
        return Cause(
            name="batch norm per rank",
            text=f"{norms[0]} computes mean and variance from each rank's own rows",
            fix="convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm (GPU), or use another norm",
        )
    dropouts = [layer for layer in parting.layers if "Dropout" in layer]
    if dropouts:
        return Cause(
            name="dropout per rank",
            text=f"{dropouts[0]} draws other masks for a rank's rows than for the whole batch",
            fix="nothing is wrong, but it cannot be compared: set the dropout to 0 for this check",
        )
    return None


RULES: Sequence[Callable[[PartingStep], Cause | None]] = (
    _check_start,
    _check_undivided,
    _check_whole_batches,
    _check_learning_rate,
    _check_samples,
    _check_gradients,
    _check_means,
    _check_layers,
)
"""In the order of their certainty: what the ranks read, then what they computed, then what the model has."""
