"""Make the recordings of a script that divides its own data comparable with those of a run on one worker.

A rank of a script of DDP, Accelerate or another framework computes the loss of its own rows. The loss of the whole
batch is the mean over the ranks, weighted by their rows. Gradients and parameters are whole after the reduction, and
stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from rankless.records.recorded_calls import JobCalled, Leaf, ResultRecord, StepInputs, StepRecorded
from rankless.verify.recordings import Recording, to_array


@dataclass(frozen=True, kw_only=True)
class ForeignStep:
    """One optimizer step of one rank, and the position of its losses among the results."""

    position: int
    losses: JobCalled
    stepped: StepRecorded

    @property
    def inputs(self) -> StepInputs:
        """What the rank put into the step."""
        return self.stepped.inputs or StepInputs((), (), ())

    @property
    def rows(self) -> int:
        """The number of rows of all forward calls of the step."""
        return sum(self.inputs.rows)


def list_steps(recording: Recording) -> list[ForeignStep]:
    """Return a rank's steps in order."""
    return [
        ForeignStep(position=position, losses=losses, stepped=stepped)
        for position, (losses, stepped) in enumerate(zip(recording.results, recording.results[1:], strict=False))
        if isinstance(losses, JobCalled) and isinstance(stepped, StepRecorded)
    ]


def combine_losses(many: Sequence[Recording]) -> list[Recording]:
    """Return the ranks' recordings with the loss of the whole batch in place of each rank's own."""
    steps = [list_steps(recording) for recording in many]
    combined: list[list[ResultRecord]] = [list(recording.results) for recording in many]
    for ranks in zip(*steps, strict=False):  # ranks may make different numbers of steps: the comparison shows it
        whole = _combine_step(ranks)
        for results, step in zip(combined, ranks, strict=True):
            results[step.position] = msgspec.structs.replace(step.losses, leaves=whole)
    return [replace(recording, results=tuple(results)) for recording, results in zip(many, combined, strict=True)]


def _combine_step(ranks: Sequence[ForeignStep]) -> list[Leaf]:
    """Return the losses of the whole batch, or each rank's own if the ranks' losses differ in number or shape."""
    first = ranks[0].losses.leaves
    shapes = {tuple((leaf.path, leaf.shape, leaf.is_integer) for leaf in rank.losses.leaves) for rank in ranks}
    rows = np.array([rank.rows for rank in ranks], dtype=np.float64)
    if len(shapes) > 1 or any(leaf.is_integer for leaf in first):
        return first
    weights = rows / rows.sum() if rows.sum() > 0 else np.full(len(ranks), 1 / len(ranks))
    whole = []
    for index, leaf in enumerate(first):
        losses = np.stack([to_array(rank.losses.leaves[index]) for rank in ranks])
        data = np.tensordot(weights, losses, axes=1)
        whole.append(msgspec.structs.replace(leaf, data=np.asarray(data, dtype=np.float64).tobytes()))
    return whole
