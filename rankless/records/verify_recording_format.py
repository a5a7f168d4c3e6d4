"""The results that `rankless verify` compares: one file per rank, with a frame for every job call and training step.

A frame is a length of 4 bytes, little-endian, and then one of the structs below in MessagePack.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from rankless.records.encoding import encode_msgpack
from rankless.records.framing import FrameFormat, read_messages
from rankless.records.job_programs import DefinedJob

FRAME_FORMAT = FrameFormat("<I")
TEXT = "text"
"""The dtype of a leaf that is not a number. Its data are the bytes of its text, one integer each."""


def results_file(folder: str, rank: int) -> Path:
    """Return the path of the file of a rank's frames."""
    return Path(folder) / f"rank{rank}.results"


def tensors_file(folder: str, rank: int) -> Path:
    """Return the path of a rank's final parameters and buffers, as safetensors of float64 and int64."""
    return Path(folder) / f"rank{rank}.safetensors"


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One tensor or number of a job's result. `data` is float64 or int64, whatever `dtype` was."""

    path: str
    """The path to the leaf, like "['loss']", or empty if the result is the leaf."""
    dtype: str
    shape: tuple[int, ...]
    is_integer: bool
    data: bytes


class TensorSummary(msgspec.Struct, frozen=True, array_like=True):
    """A few numbers of a tensor, whose differences estimate the distance of two tensors.

    `sketch` holds signed sums of the elements (see `verify.recording.tensor_sketch`). `norm` is the Euclidean norm.
    """

    norm: float
    sketch: tuple[float, ...]


class TensorState(msgspec.Struct, frozen=True, array_like=True):
    """A parameter or buffer at one moment. `gradient` is None if it has none."""

    name: str
    dtype: str
    size: int
    value: TensorSummary
    gradient: TensorSummary | None


class ModelRegistered(msgspec.Struct, frozen=True, tag="registered"):
    """A model has been registered, before its first step."""

    model: str
    tensors: list[TensorState]


class JobCalled(msgspec.Struct, frozen=True, tag="called"):
    """A job has been called: its call number `call`, from 1, after `steps` training steps."""

    job: str
    call: int
    steps: int
    line: str
    leaves: list[Leaf]


class StepInputs(msgspec.Struct, frozen=True, array_like=True):
    """What a rank put into one step of a script that is recorded from outside."""

    rows: tuple[int, ...]
    """The number of rows of each forward call of the step."""
    samples: tuple[int, ...]
    """A digest of each of these rows."""
    learning_rates: tuple[float, ...]
    """The learning rate of each parameter group."""


class StepRecorded(msgspec.Struct, frozen=True, tag="stepped"):
    """The training step of the job call recorded just before. `step` counts the steps of all jobs, from 1."""

    job: str
    step: int
    tensors: list[TensorState]
    inputs: StepInputs | None = None


TensorKind = Literal["parameter", "buffer", "rows"]
"""rows: the ids or the rows of a table, which has no gradients of their own."""


class FinalTensorMetadata(msgspec.Struct, frozen=True, array_like=True):
    """What the tensor file does not contain about one of its tensors."""

    name: str
    dtype: str
    kind: TensorKind


class ScriptSurvey(msgspec.Struct, frozen=True, array_like=True):
    """The script's jobs at its end, and the modules with parameters that no job uses.

    `layers` has the kinds of layers of the models, such as "Dropout", if the script is recorded from outside.
    """

    jobs: tuple[DefinedJob, ...] = ()
    outside: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()


class RecordingFinished(msgspec.Struct, frozen=True, tag="finished"):
    """The run has ended and the tensor file is complete. `stopped` says whether a step limit ended the script."""

    steps: int
    tensors: list[FinalTensorMetadata]
    stopped: bool = False
    survey: ScriptSurvey = ScriptSurvey()


ResultRecord = ModelRegistered | JobCalled | StepRecorded | RecordingFinished


def encode_result(result: msgspec.Struct) -> bytes:
    """Return the frame of a result."""
    return FRAME_FORMAT.encode(encode_msgpack(result))


def read_results(path: Path) -> Iterator[ResultRecord]:
    """Yield the results of a file, up to the last whole one: a worker may have died while it wrote."""
    decoder = msgspec.msgpack.Decoder(ResultRecord)
    for message in read_messages(path, FRAME_FORMAT):
        yield decoder.decode(message)


Role = Literal["input", "value", "output", "plain"]
"""An input of the program, a value that it computes, an output, or (on one worker) a plain result: what the function
itself returns as plain PyTorch.
"""


class ComputedValue(msgspec.Struct, frozen=True, array_like=True):
    """One whole value. `inputs` names the values from which the program computes it."""

    role: Role
    name: str
    operator: str
    line: str
    dtype: str
    shape: tuple[int, ...]
    value: TensorSummary
    inputs: tuple[str, ...] = ()


def values_file(folder: str, rank: int) -> Path:
    """Return the path of the file in which a rank writes its values, in the order of their computation."""
    return Path(folder) / f"rank{rank}.values"


def read_values(folder: str, rank: int) -> Iterator[ComputedValue]:
    """Yield the values that a rank has written, none if the script never made the call."""
    file = values_file(folder, rank)
    if file.exists():
        decoder = msgspec.msgpack.Decoder(ComputedValue)
        for message in read_messages(file, FRAME_FORMAT):
            yield decoder.decode(message)
