"""What workers of other hosts have recorded for `rankless verify`, brought to host 0 over the control channel."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from rankless.config.run_config import JobStart
from rankless.launch.rendezvous.messages import RecordingChunk

PIECE_BYTES = 1 << 20
NAME = re.compile(r"rank(\d+)\.(results|safetensors|values)")


def recorded(start: JobStart, place: int) -> Iterator[RecordingChunk]:
    """The files of a host's workers, in pieces."""
    if start.recording is None:
        return
    for path in sorted(Path(start.recording).glob("rank*")):
        match = NAME.fullmatch(path.name)
        if match is None or int(match[1]) >= start.world_size or start.host_of(int(match[1])) != place:
            continue
        with path.open("rb") as file:
            data = file.read(PIECE_BYTES)
            while True:
                following = file.read(PIECE_BYTES)
                yield RecordingChunk(name=path.name, data=data, is_last=not following)
                if not following:
                    break
                data = following


def take_recorded(frame: RecordingChunk, start: JobStart) -> None:
    """Write a piece of a file to where this host's own workers record; whole once its last piece has come."""
    match = NAME.fullmatch(frame.name)
    if match is None or start.recording is None or int(match[1]) >= start.world_size:
        return
    folder = Path(start.recording)
    folder.mkdir(parents=True, exist_ok=True)
    growing = folder / f".{frame.name}.coming"
    with growing.open("ab") as file:
        file.write(frame.data)
    if frame.is_last:
        os.replace(growing, folder / frame.name)  # hosts may share a disk, and the file be there already
