"""The part of a save after all ranks have agreed: it needs only the disk, and may run in a thread."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from torch import Tensor

from rankless.checkpoint.file_io import write_manifest
from rankless.checkpoint.folder import UncommittedCheckpoint, disk_errors
from rankless.checkpoint.incremental.keyed_rows import KeyedRows
from rankless.checkpoint.incremental.row_files import write_rows
from rankless.checkpoint.manifest import Manifest, SeriesPosition
from rankless.checkpoint.tensor_file_writer import TensorFileWriter


class CheckpointSeries(Protocol):
    """The run that a checkpoint belongs to. Only rank 0 calls it."""

    def next_position(self) -> SeriesPosition:
        """Return the position of a checkpoint that is saved now."""

    def find_latest(self) -> Path | None:
        """Return the folder of the checkpoint that was saved last; None if there is none."""

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
    """The rest of the file, and the tensors of `keyed_rows`."""
    keyed_rows: list[KeyedRows]
    """What rank 0 writes as rows by ids, into files of their own."""
    previous: Path
    """Where the checkpoint before may be, which may have files of the same rows."""
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
        keyed = {name for rows in self.keyed_rows for name in rows.tensors}
        for name, tensor in self.tensors.items():
            if name not in keyed:
                self.file.write(name, tensor)
        file = self.file.finish()
        if self.rank != 0:
            self.uncommitted.report_written(self.rank, file)
            return
        rows = write_rows(self.uncommitted.folder, self.keyed_rows, self.tensors, self.previous)
        files = [file, *rows.files, *self.uncommitted.collect_files(self.writers)]
        manifest = msgspec.structs.replace(self.manifest, files=files, tables=rows.tables)
        write_manifest(self.uncommitted.folder, manifest)
        self.uncommitted.commit()
