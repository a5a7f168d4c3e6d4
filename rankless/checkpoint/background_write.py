"""The part of a save after all ranks have agreed: it needs only the disk, and may run in a thread."""

from dataclasses import dataclass
from typing import Protocol

import msgspec
from torch import Tensor

from rankless.checkpoint.file_io import write_manifest
from rankless.checkpoint.folder import UncommittedCheckpoint, disk_errors
from rankless.checkpoint.manifest import Manifest, SeriesPosition
from rankless.checkpoint.tensor_file_writer import TensorFileWriter


class CheckpointSeries(Protocol):
    """The run that a checkpoint belongs to. Only rank 0 calls it."""

    def next_position(self) -> SeriesPosition:
        """Return the position of a checkpoint that is saved now."""

    def remove_expired(self) -> None:
        """Remove checkpoints that are not to be kept, after the commit of a new one."""


@dataclass(frozen=True, kw_only=True)
class WriteTask:
    """One rank's part of a save: its file, and on rank 0 the manifest and the commit."""

    rank: int
    writers: list[int]
    """The ranks other than 0 that write a file."""
    uncommitted: UncommittedCheckpoint
    file: TensorFileWriter
    """This rank's file, if it writes one. What all ranks gather has been written to it."""
    tensors: dict[str, Tensor]
    """The rest of the file."""
    manifest: Manifest
    """The manifest without its list of files, which is known after the write."""
    series: CheckpointSeries | None

    def run(self) -> None:
        """Write the files. If this raises `CheckpointError`, the previous checkpoint is still there."""
        with disk_errors(self.uncommitted.target):
            try:
                self._write()
            except BaseException as error:
                if self.rank == 0:
                    self.uncommitted.discard()
                else:
                    self.uncommitted.report_failure(self.rank, because=error)
                raise
            finally:
                self.file.close()
        if self.rank == 0 and self.series is not None:
            self.series.remove_expired()

    def _write(self) -> None:
        if self.rank != 0 and self.rank not in self.writers:
            return
        for name, tensor in self.tensors.items():
            self.file.write(name, tensor)
        file = self.file.finish()
        if self.rank != 0:
            self.uncommitted.report_written(self.rank, file)
            return
        files = [file, *self.uncommitted.collect_files(self.writers)]
        write_manifest(self.uncommitted.folder, msgspec.structs.replace(self.manifest, files=files))
        self.uncommitted.commit()
