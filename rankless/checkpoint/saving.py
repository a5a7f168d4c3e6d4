"""`Saver`: all ranks compare what they hold, those that hold something write it, and rank 0 commits.

# Note [in the background]: the tensors are copied, and a thread of the same process writes them. A rank copies its
# pieces of divided tensors; those that are written whole are written before the thread starts. The thread calls no
# collective: two threads that start collectives on one group would sooner or later start them in different orders on
# the ranks, and all would hang. The ranks agree before the thread starts. Then they exchange messages through the
# folder (Note [files of ranks] in `folder_commit`). They exchange the result at the next save, load or wait, which the
script
# calls on every rank. It is a thread and not a forked process, because a fork would inherit locks that torch's threads
# hold.
"""

import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import torch
from torch import Tensor

from rankless.checkpoint.checkpoint_series import CheckpointSeries
from rankless.checkpoint.content import Content, gather_content, leave_out_rows, pack_random_state, unpack_random_state
from rankless.checkpoint.folder_commit import UncommittedCheckpoint, disk_errors, resolve_target
from rankless.checkpoint.incremental_row_files import KeyedRows, write_rows
from rankless.checkpoint.manifest import Manifest, Node, RowRange, SeriesPosition, TensorPiece
from rankless.checkpoint.manifest_io import write_manifest
from rankless.checkpoint.raise_on_all_ranks import Agreement
from rankless.checkpoint.tensor_file_writer import TensorFileWriter
from rankless.collectives.byte_messages import all_gather_bytes, broadcast_bytes
from rankless.errors import CheckpointError
from rankless.ownership.partitioned_tensor import Partition, find_partition, list_partitions
from rankless.ownership.shard_layout import select_ranges
from rankless.ownership.state_owner import Replica, StateOwner
from rankless.parallel.mesh import Mesh
from rankless.records.encoding import encode_msgpack
from rankless.version import VERSION as RANKLESS_VERSION


@dataclass(frozen=True, kw_only=True)
class FileShare:
    """What one rank writes.

    Attributes:
        tensors: Tensors that this rank has, by their names in the file, not copied. A piece has a name of its own.
        pieces: Those of `tensors` that are pieces.
        gathered: Divided tensors that are written whole, by name, in an order that is equal on all ranks.
        writers: The ranks other than 0 that write a file.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    pieces: dict[str, TensorPiece] = field(default_factory=dict)
    gathered: dict[str, Tensor] = field(default_factory=dict)
    writers: list[int] = field(default_factory=list)


def share_whole(tensors: Mapping[str, Tensor], *, rank: int) -> FileShare:
    """Return the share of a rank if rank 0 writes everything.

    Args:
        tensors: All tensors by name, of which some may be divided.
        rank: The rank.
    """
    gathered = {name: tensor for name, tensor in tensors.items() if find_partition(tensor) is not None}
    others = {name: tensor for name, tensor in tensors.items() if name not in gathered}
    return FileShare(tensors=others if rank == 0 else {}, gathered=gathered)


@dataclass(frozen=True, kw_only=True)
class OwnPieces:
    """The pieces of divided tensors that one rank writes.

    Attributes:
        tensors: Their elements, by their names in the file, not copied.
        pieces: What they are pieces of, by name.
    """

    tensors: dict[str, Tensor]
    pieces: dict[str, TensorPiece]

    @property
    def size(self) -> int:
        """Their bytes; -1 if there are none."""
        return sum(part.nbytes for part in self.tensors.values()) if self.tensors else -1


def list_own_pieces(tensors: Mapping[str, Tensor], mesh: Mesh) -> OwnPieces:
    """Return the pieces that this rank writes: the first of the ranks that hold the same piece does.

    Args:
        tensors: All tensors by name, of which some may be divided.
        mesh: All ranks.
    """
    found: list[tuple[TensorPiece, Tensor]] = []
    for name, tensor in tensors.items():
        partitions = list_partitions(tensor)
        replica = Replica(tensor, tuple(partition.group for partition in partitions))
        is_copy = any(partition.is_copy for partition in partitions)
        if partitions and not is_copy and replica.find_first_ranks(mesh)[mesh.rank] == mesh.rank:
            found += split_piece(name, partitions)
    return OwnPieces(
        tensors={piece.name: part for piece, part in found}, pieces={piece.name: piece for piece, _ in found}
    )


def share_by_owner(tensors: Mapping[str, Tensor], own: OwnPieces, sizes: Sequence[int], rank: int) -> FileShare:
    """Return a rank's share if each writes its pieces, and about as many bytes as the others.

    Args:
        tensors: All tensors by name, of which some may be divided. All ranks hold tensors of the same names and shapes.
        own: The pieces of this rank.
        sizes: The bytes of each rank's pieces; -1 for a rank that has none.
        rank: The rank.
    """
    whole = {name: tensor for name, tensor in tensors.items() if find_partition(tensor) is None}
    shares = assign_tensors(whole, [max(0, size) for size in sizes])
    written = own.tensors | {name: whole[name] for name in shares[rank]}
    writers = [number for number in range(1, len(sizes)) if shares[number] or sizes[number] >= 0]
    return FileShare(tensors=written, pieces=own.pieces, writers=writers)


def split_piece(name: str, partitions: Sequence[Partition]) -> Iterator[tuple[TensorPiece, Tensor]]:
    """Yield the boxes of a tensor's elements that this rank has, and their elements; nothing for no rows.

    Args:
        name: The tensor's name.
        partitions: How one axis after the other divides it.
    """
    shape = partitions[0].layout.shape
    ranges: dict[int, list[tuple[int, int]]] = {}
    for partition in partitions:
        dim = partition.layout.placement.dim
        ranges[dim] = select_ranges(ranges.get(dim, [(0, shape[dim])]), partition.own_ranges)
    local = partitions[0].get_current_shard()
    dims = sorted(ranges)
    for chosen in product(*(ranges[dim] for dim in dims)):
        part = local
        for dim, (start, stop) in zip(dims, chosen, strict=True):
            before = sum(high - low for low, high in ranges[dim] if low < start)
            part = part.narrow(dim, before, stop - start)
        first, *others = [RowRange(dim, *rows) for dim, rows in zip(dims, chosen, strict=True)]
        piece = TensorPiece(name, shape, first.dim, first.start, first.stop, tuple(others))
        yield piece, part


def assign_tensors(tensors: Mapping[str, Tensor], loads: list[int]) -> list[list[str]]:
    """Return the names of the tensors that each rank writes: about as many bytes each, equal on every rank.

    Args:
        tensors: The tensors by name.
        loads: The bytes that each rank writes besides, to which the tensors' are added.
    """
    shares: list[list[str]] = [[] for _ in loads]
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        # An empty tensor has an entry in the file's header too.
        loads[rank] += max(1, tensor.nbytes)
    return shares


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
        run_for_all: Makes an operation of all ranks, again if one is lost in it; `mesh` and `owner` are then others.
    """

    def __init__(
        self,
        *,
        mesh: Mesh,
        owner: StateOwner | None = None,
        run_for_all: Callable[[Callable[[], Any]], Any] = lambda attempt: attempt(),
    ) -> None:
        self.mesh = mesh
        self.owner = owner or StateOwner()
        self.run_for_all = run_for_all
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
        chosen = options or SaveOptions()
        self.run_for_all(lambda: self._save(path, objects, options=chosen, series=series))

    def _save(
        self,
        path: str | os.PathLike[str],
        objects: Mapping[str, Any],
        *,
        options: SaveOptions,
        series: CheckpointSeries | None,
    ) -> None:
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
