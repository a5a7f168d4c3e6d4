"""What `rankless verify` compares: one file per rank, a frame for every job call and every training step.

A frame is a length of 4 bytes, little-endian, then a struct below in MessagePack.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rankless.records.framing import FrameFormat, read_messages
from rankless.records.job_programs import KnownJob

FRAME_FORMAT = FrameFormat("<I")
TEXT = "text"
"""The dtype of a leaf that is no number; its data are the bytes of its text, one whole number each."""


def results_file(folder: str, rank: int) -> Path:
    """Where a rank writes its frames."""
    return Path(folder) / f"rank{rank}.results"


def tensors_file(folder: str, rank: int) -> Path:
    """Where a rank writes its final parameters and buffers, as safetensors of float64 and int64."""
    return Path(folder) / f"rank{rank}.safetensors"


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One tensor or number of a job's result; `data` is float64 or int64, whatever `dtype` was."""

    path: str
    """As "['loss']"; empty where the result is the leaf."""
    dtype: str
    shape: tuple[int, ...]
    is_integer: bool
    data: bytes


class TensorSummary(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in a few numbers, of which the differences tell how far two tensors are apart.

    `sketch` holds signed sums of its elements (`verify.recording.recorder` says which); `norm` is its Euclidean norm.
    """

    norm: float
    sketch: tuple[float, ...]


class TensorState(msgspec.Struct, frozen=True, array_like=True):
    """A parameter or buffer as it was at one time; `gradient` is None without one."""

    name: str
    dtype: str
    size: int
    value: TensorSummary
    gradient: TensorSummary | None


class ModelRegistered(msgspec.Struct, frozen=True, tag="registered"):
    """A model became known, before its first step."""

    model: str
    tensors: list[TensorState]


class JobCalled(msgspec.Struct, frozen=True, tag="called"):
    """A job was called: its `call`-th call, from 1, when `steps` training steps were done before it."""

    job: str
    call: int
    steps: int
    line: str
    leaves: list[Leaf]


class StepRecorded(msgspec.Struct, frozen=True, tag="stepped"):
    """The training step of the job call written just before; `step` counts all jobs' steps, from 1."""

    job: str
    step: int
    tensors: list[TensorState]


class FinalTensor(msgspec.Struct, frozen=True, array_like=True):
    """What the tensor file cannot say of one of its tensors."""

    name: str
    dtype: str
    is_parameter: bool


class Survey(msgspec.Struct, frozen=True, array_like=True):
    """What the script held at the end: its jobs, and modules with parameters that no job has been given."""

    jobs: tuple[KnownJob, ...] = ()
    outside: tuple[str, ...] = ()


class RecordingFinished(msgspec.Struct, frozen=True, tag="finished"):
    """The run is over and the tensor file is whole. `stopped` if the script was ended before its own end."""

    steps: int
    tensors: list[FinalTensor]
    stopped: bool = False
    survey: Survey = Survey()


ResultRecord = ModelRegistered | JobCalled | StepRecorded | RecordingFinished


def encode_result(result: msgspec.Struct) -> bytes:
    """Return the frame of a result."""
    return FRAME_FORMAT.encode(msgspec.msgpack.encode(result))


def read_results(path: Path) -> Iterator[ResultRecord]:
    """Yield the results of a file, up to the last whole one: a worker may have died while it wrote."""
    decoder = msgspec.msgpack.Decoder(ResultRecord)
    for message in read_messages(path, FRAME_FORMAT):
        yield decoder.decode(message)
