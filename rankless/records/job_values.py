"""All values of one job call, as `rankless verify` compares them to find the first that differs: a file per rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from rankless.records.framing import read_messages
from rankless.records.job_results import FRAME_FORMAT, TensorSummary

Role = Literal["input", "value", "output", "plain"]
"""What goes into the program, what it computes, what comes out of it, and (on one worker) what the function itself
gave when it ran as plain PyTorch.
"""


class ComputedValue(msgspec.Struct, frozen=True, array_like=True):
    """One value, whole; `inputs` names the values that it was computed from."""

    role: Role
    name: str
    operator: str
    line: str
    dtype: str
    shape: tuple[int, ...]
    value: TensorSummary
    inputs: tuple[str, ...] = ()


def values_file(folder: str, rank: int) -> Path:
    """Where a rank writes its values, in the order in which they were computed."""
    return Path(folder) / f"rank{rank}.values"


def read_values(folder: str, rank: int) -> Iterator[ComputedValue]:
    """The values that a rank has written; none if the call was never made."""
    file = values_file(folder, rank)
    if file.exists():
        decoder = msgspec.msgpack.Decoder(ComputedValue)
        for message in read_messages(file, FRAME_FORMAT):
            yield decoder.decode(message)
