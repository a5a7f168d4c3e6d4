"""Transfers what workers of other hosts record for `rankless verify` to host 0, over the control channel."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from rankless.config.run_config import AgreedJobConfig
from rankless.launch.rendezvous.messages import RecordingChunk

CHUNK_BYTES = 1 << 20
_FILE_NAME = re.compile(r"rank(\d+)\.(results|safetensors|values)")


def read_recording(start: AgreedJobConfig, host_index: int) -> Iterator[RecordingChunk]:
    """Yield the files that a host's workers have recorded, in chunks."""
    if start.recording is None:
        return
    for path in sorted(Path(start.recording).glob("rank*")):
        match = _FILE_NAME.fullmatch(path.name)
        if match is None or int(match[1]) >= start.world_size or start.host_of(int(match[1])) != host_index:
            continue
        with path.open("rb") as file:
            data = file.read(CHUNK_BYTES)
            while True:
                next_data = file.read(CHUNK_BYTES)
                yield RecordingChunk(name=path.name, data=data, is_last=not next_data)
                if not next_data:
                    break
                data = next_data


def write_recording(chunk: RecordingChunk, start: AgreedJobConfig) -> None:
    """Append a chunk of a file in the folder where this host's workers record. The last chunk completes the file."""
    match = _FILE_NAME.fullmatch(chunk.name)
    if match is None or start.recording is None or int(match[1]) >= start.world_size:
        return
    folder = Path(start.recording)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{chunk.name}.partial"
    with partial.open("ab") as file:
        file.write(chunk.data)
    if chunk.is_last:
        os.replace(partial, folder / chunk.name)  # on a shared disk the file exists already
