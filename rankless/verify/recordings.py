"""Read the recordings of one run, one per rank."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from rankless.records.recorded_calls import (
    FinalTensorMetadata,
    Leaf,
    RecordingFinished,
    ResultRecord,
    ScriptSurvey,
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
