"""Read the recordings of one run, one per rank, and combine those of a script that divides its own data.

A rank of a script of DDP, Accelerate or another framework computes the loss of its own rows. The loss of the whole
batch is the mean over the ranks, weighted by their rows. Gradients and parameters are whole after the reduction, and
stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy

from rankless.records.verify_recording_format import (
    FinalTensorMetadata,
    JobCalled,
    Leaf,
    RecordingFinished,
    ResultRecord,
    ScriptSurvey,
    StepInputs,
    StepRecorded,
    read_results,
    results_file,
    tensors_file,
)

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The recording of one rank. `finished` is False if the rank ended before its script did."""

    rank: int
    results: tuple[ResultRecord, ...]
    finished: bool
    steps: int
    described: tuple[FinalTensorMetadata, ...]
    tensors: dict[str, Array]
    stopped: bool = False
    """Whether the run was stopped before the script ended."""
    survey: ScriptSurvey = field(default_factory=ScriptSurvey)


def read_recordings(folder: str, worker_count: int) -> list[Recording | None]:
    """Return the recordings of a run's ranks in order; None for a rank without one."""
    return [_read_recording(folder, rank) for rank in range(worker_count)]


def take_beginning(recording: Recording, shorter: Recording) -> Recording:
    """Return as much of a recording as a run has that was stopped earlier, without the final tensors."""
    if not shorter.stopped or shorter.steps >= recording.steps:
        return recording
    results = recording.results[: len(shorter.results)]
    return replace(recording, results=results, finished=False, stopped=True, steps=shorter.steps, tensors={})


def to_array(leaf: Leaf) -> Array:
    """Return a result's numbers in float64 or int64."""
    return np.frombuffer(leaf.data, dtype=np.int64 if leaf.is_integer else np.float64).reshape(leaf.shape)


def _read_recording(folder: str, rank: int) -> Recording | None:
    file: Path = results_file(folder, rank)
    if not file.exists():
        return None
    results = tuple(read_results(file))
    last = results[-1] if results else None
    ended = last if isinstance(last, RecordingFinished) else None
    return Recording(
        rank=rank,
        results=results[:-1] if ended else results,
        finished=ended is not None,
        steps=ended.steps if ended else 0,
        described=tuple(ended.tensors) if ended else (),
        tensors=safetensors.numpy.load_file(tensors_file(folder, rank)) if ended else {},
        stopped=ended.stopped if ended else False,
        survey=ended.survey if ended else ScriptSurvey(),
    )


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
