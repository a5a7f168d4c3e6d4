"""`Saver`: all ranks compare what they hold, those that hold something write it, and rank 0 commits.

# Note [in the background]: the tensors are copied, and a thread of the same process writes them. A rank copies its
# pieces of divided tensors; those that are written whole are written before the thread starts. The thread calls no
# collective: two threads that start collectives on one group would sooner or later start them in different orders on
# the ranks, and all would hang. The ranks agree before the thread starts. Then they exchange messages through the
# folder (Note [files of ranks] in `folder`). They exchange the result at the next save, load or wait, which the script
# calls on every rank. It is a thread and not a forked process, because a fork would inherit locks that torch's threads
# hold.
"""

import hashlib
import os
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import torch
from torch import Tensor

from rankless.checkpoint.collective_errors import Agreement
from rankless.checkpoint.content import Content, gather_content, pack_random_state, unpack_random_state
from rankless.checkpoint.file_io import write_manifest
from rankless.checkpoint.file_shares import FileShare, OwnPieces, list_own_pieces, share_by_owner, share_whole
from rankless.checkpoint.folder import UncommittedCheckpoint, disk_errors, resolve_target
from rankless.checkpoint.incremental.row_files import KeyedRows, write_rows
from rankless.checkpoint.incremental.rows_of_others import leave_out_rows
from rankless.checkpoint.manifest import Manifest, Node, SeriesPosition
from rankless.checkpoint.retention import CheckpointSeries
from rankless.checkpoint.tensor_file_writer import TensorFileWriter
from rankless.collectives.byte_messages import all_gather_bytes, broadcast_bytes
from rankless.errors import CheckpointError
from rankless.ownership.partitioned_tensor import find_partition
from rankless.ownership.state_owner import StateOwner, WholeOwner
from rankless.parallel.mesh import Mesh
from rankless.records.encoding import encode_msgpack
from rankless.version import VERSION as RANKLESS_VERSION

Layout = Literal["whole", "sharded"]


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How to save. "whole": rank 0 writes one file. "sharded": each rank writes a file.

    Tensors that are divided between ranks are written whole in the one, tensor by tensor, and in pieces in the other.
    With `background` the objects are copied, and written while the script goes on. `extra` is plain data.
    """

    layout: Layout = "whole"
    background: bool = False
    extra: object = None


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


class Saver:
    """Saves objects, one save at a time. Every rank calls `save` and `wait`.

    Args:
        mesh: All ranks.
        owner: Holds the states of jobs, of which a rank may have pieces only. Default: every rank has everything.
    """

    def __init__(self, *, mesh: Mesh, owner: StateOwner | None = None) -> None:
        self.mesh = mesh
        self.owner = owner or WholeOwner()
        self._background_snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._failures: list[BaseException] = []

    def save(
        self,
        path: str | os.PathLike[str],
        objects: Mapping[str, Any],
        *,
        options: SaveOptions | None = None,
        series: CheckpointSeries | None = None,
    ) -> None:
        """Write a checkpoint folder at `path`: complete on return, or later with `background`.

        `objects` have a `state_dict()`, by name. The state of the random number generators is saved too. The previous
        checkpoint at `path` is replaced at once: a crash of any rank at any point leaves the old or the new one. Raises
        `CheckpointError` on every rank; the next call of any method raises that of a background save.
        """
        options = options or SaveOptions()
        uncommitted = UncommittedCheckpoint(resolve_target(path))
        doing = f"save {os.fspath(path)}"
        try:
            writing = self._prepare(uncommitted, objects, options=options, series=series, doing=doing)
        except BaseException:
            if self.mesh.rank == 0:
                uncommitted.discard()
            raise
        if options.background:
            self._thread = threading.Thread(target=self._run, args=(writing,), name="rankless-save")
            self._thread.start()
        else:
            with Agreement(mesh=self.mesh, doing=doing):
                writing.run()

    def wait(self) -> None:
        """Return when no save is running. Raises the error of the last one, on every rank."""
        if self._thread is not None:
            with Agreement(mesh=self.mesh, doing="finish a background save"):
                self.join()

    def join(self) -> None:
        """Return when no save of this rank is running. Raises only this rank's error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failures:
            raise self._failures.pop()

    def close(self) -> str | None:
        """Return an error that was not raised yet, at the end of the process; None if there is none."""
        if self._thread is not None and self._thread.is_alive():
            return "a background save was not finished; the previous checkpoint is kept"
        return f"a background save failed: {self._failures.pop()}" if self._failures else None

    def _run(self, writing: WriteTask) -> None:
        try:
            writing.run()
        except BaseException as error:  # the next call raises it
            self._failures.append(error)

    def _prepare(
        self,
        uncommitted: UncommittedCheckpoint,
        objects: Mapping[str, Any],
        *,
        options: SaveOptions,
        series: CheckpointSeries | None,
        doing: str,
    ) -> WriteTask:
        """Do everything that needs the other ranks, or the objects as they are now."""
        mesh, token = self.mesh, uuid.uuid4().hex
        fix = "build, divide and save the same objects, to the same path, on every rank"
        with Agreement(mesh=mesh, doing=doing, fix=fix) as agreement:
            self.owner.begin_call()  # frees whole values that the script has read
            self.join()
            _check(options)
            is_sharded = options.layout == "sharded"
            with leave_out_rows(applies=mesh.rank != 0 and not is_sharded):
                content = gather_content(objects, options.extra)
            own = list_own_pieces(content.shared_tensors if is_sharded else {}, mesh)
            position, previous = None, uncommitted.target
            if mesh.rank == 0:
                position, previous = _find_place(uncommitted.target, series)
                uncommitted.open(token)
            description = content.describe(all_tensors=is_sharded)
            agreement.summary = f"{doing}, {options.layout}{' in the background' * options.background}, {description}"
            agreement.note = encode_msgpack((_digest_random_state(mesh), own.size))
        notes = [msgspec.msgpack.decode(note, type=tuple[bytes, int]) for note in agreement.notes]
        with Agreement(mesh=mesh, doing=doing):
            share = self._share(content, options, own, [size for _, size in notes])
        random = self._gather_random(same=len({digest for digest, _ in notes}) == 1, tensors=share.tensors)
        self._reserve(uncommitted, share.writers, token, doing=doing)
        return WriteTask(
            rank=mesh.rank,
            writers=share.writers,
            uncommitted=uncommitted,
            file=self._begin_file(uncommitted, content, share, options=options, doing=doing),
            tensors=share.tensors,
            keyed_rows=content.keyed_rows if mesh.rank == 0 else [],
            previous=previous,
            manifest=Manifest(
                rankless=RANKLESS_VERSION,
                position=position,
                files=[],
                objects=content.objects,
                extra=content.extra,
                random=random,
            ),
            series=series,
        )

    def _reserve(self, uncommitted: UncommittedCheckpoint, writers: list[int], token: str, *, doing: str) -> None:
        """Let the ranks that write a file reserve it in the folder that rank 0 has made."""
        if writers:
            token = broadcast_bytes(token.encode(), mesh=self.mesh).decode()
            with Agreement(mesh=self.mesh, doing=doing):
                if self.mesh.rank in writers:
                    uncommitted.reserve(self.mesh.rank, token)

    def _begin_file(
        self,
        uncommitted: UncommittedCheckpoint,
        content: Content,
        share: FileShare,
        *,
        options: SaveOptions,
        doing: str,
    ) -> TensorFileWriter:
        """Return this rank's file, to which what all ranks gather is written."""
        name = f"tensors-{self.mesh.rank}.safetensors" if options.layout == "sharded" else "tensors.safetensors"
        keyed = content.row_tensors
        written = {key: item for key, item in (share.tensors | share.gathered).items() if key not in keyed}
        in_order = {key: written[key] for key in [*content.shared_tensors, *written] if key in written}
        file = TensorFileWriter(uncommitted.folder / name, in_order, share.pieces)
        if share.gathered:
            with Agreement(mesh=self.mesh, doing=doing), disk_errors(uncommitted.target):
                self._write_gathered(share.gathered, file)
        return file

    def _share(self, content: Content, options: SaveOptions, own: OwnPieces, sizes: Sequence[int]) -> FileShare:
        """Return what this rank writes: as it is now, or copies of it if the script goes on meanwhile.

        Args:
            content: The checkpoint's content.
            options: The options of the save.
            own: The pieces that this rank writes, if each writes its own.
            sizes: The bytes of each rank's pieces.
        """
        rank, rows = self.mesh.rank, content.row_tensors
        others = {name: tensor for name, tensor in content.shared_tensors.items() if name not in rows}
        sizes = [max(0, sizes[0]) + sum(tensor.nbytes for tensor in rows.values()), *sizes[1:]]
        share = (
            share_by_owner(others, own, sizes, rank) if options.layout == "sharded" else share_whole(others, rank=rank)
        )
        if rank == 0:
            share.tensors.update(content.extra_tensors | rows)
        if not options.background:
            return share
        self._background_snapshot.take(share.tensors)
        return replace(share, tensors=dict(self._background_snapshot.tensors))

    def _write_gathered(self, tensors: Mapping[str, Tensor], file: TensorFileWriter) -> None:
        """Gather divided tensors one after the other. Rank 0 writes each to its file before the next."""
        failure = None
        for name, tensor in tensors.items():
            partition = find_partition(tensor)
            assert partition is not None
            whole = partition.gather_once()
            if self.mesh.rank == 0 and failure is None:
                try:
                    file.write(name, whole)
                except OSError as error:  # raised when no other rank waits for this one
                    failure = error
            del whole
        if failure is not None:
            file.close()
            raise failure

    def _gather_random(self, *, same: bool, tensors: dict[str, Tensor]) -> list[Node]:
        """Return every rank's random state, or the one that all have. Rank 0 adds their tensors to its own."""
        mesh = self.mesh
        packed = pack_random_state(mesh.device, rank=0 if same else mesh.rank)
        states = [unpack_random_state(data) for data in ([packed] if same else all_gather_bytes(packed, mesh=mesh))]
        if mesh.rank == 0:
            for _, state_tensors in states:
                tensors.update(state_tensors)
        return [node for node, _ in states]


def _digest_random_state(mesh: Mesh) -> bytes:
    """Return a digest that is equal on ranks with the same random state."""
    return hashlib.sha256(pack_random_state(mesh.device, rank=0)).digest()


def _find_place(target: Path, series: CheckpointSeries | None) -> tuple[SeriesPosition | None, Path]:
    """Return the position of a new checkpoint in its series, and where the one before may be."""
    if series is None:
        return None, target
    return series.next_position(), series.find_latest() or target


def _check(options: SaveOptions) -> None:
    if options.layout not in get_args(Layout):
        raise CheckpointError(
            expected=f"a layout of {', '.join(get_args(Layout))}",
            found=repr(options.layout),
            fix='pass layout="sharded" for one file per rank, or leave it out',
        )


class Snapshot:
    """Tensors copied to the CPU, contiguous.

    # Note [reused memory]: touching fresh memory costs several times as much as copying. So the next snapshot copies
    # into the memory of this one.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors as they are now, and drop all others."""
        held, self.tensors = self.tensors, {}
        copied = [(name, tensor, held.pop(name, None)) for name, tensor in tensors.items()]
        del held  # free what is not needed before more memory is allocated
        # Memory made in inference mode could not be copied into outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor, memory in copied:
                if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
                    # A GPU can copy to page-locked memory without a stop at every tensor.
                    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
                self.tensors[name] = memory.copy_(tensor, non_blocking=True)
        for device in devices_of(tensors.values()):
            torch.cuda.synchronize(device)


def devices_of(tensors: Iterable[Tensor]) -> Sequence[torch.device]:
    """Return the GPUs that hold tensors."""
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
