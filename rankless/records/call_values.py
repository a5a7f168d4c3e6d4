"""All values of one job call, one file per rank, with which `rankless verify` finds the first that differs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from rankless.records.framing import read_messages
from rankless.records.recorded_calls import FRAME_FORMAT, TensorSummary

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
