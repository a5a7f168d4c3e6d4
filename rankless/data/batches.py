"""From what a rank has read to what the script gets: plain tensors, or logical ones once all ranks agree."""

import zlib
from dataclasses import replace
from typing import Any

import msgspec
from torch import Tensor

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.collectives.typed_values import decode_value, encode_value
from rankless.data.batch_tree import OwnRows, PerSample, leaves_of, map_leaves, rows_of
from rankless.data.logical_tensor import GatherNotice, LogicalTensor
from rankless.data.reading import BatchRead, BatchRequest
from rankless.errors import DataError
from rankless.parallel.mesh import Mesh
from rankless.parallel.placement import Shard, split_lengths

_WHOLE = 'pass reading="replicated": every rank then reads and collates the whole batch'


class _Outline(msgspec.Struct, frozen=True):
    """What must be equal on all ranks: which samples the whole batch has, and each leaf but for its rows."""

    digest: bytes = b""
    leaves: list[tuple[str, str]] = []
    ended: bool = False
    error: str = ""


def make_logical(read: BatchRead, *, mesh: Mesh, notice: GatherNotice) -> Any:
    """The batch with its tensors logical; whole and plain if it has fewer rows than there are workers."""
    request = read.request
    rows = request.rows if request.rows is not None else rows_of(read.data)
    if mesh.size == 1 or rows < mesh.size:
        return read.data
    placement = Shard(0, split_lengths(rows, mesh.size))

    def convert(path: str, leaf: Any) -> Any:
        if isinstance(leaf, OwnRows):
            return identified(path, LogicalTensor(leaf.local, placement=placement, mesh=mesh, notice=notice))
        if not isinstance(leaf, Tensor):
            return _whole_or_refused(path, leaf, request)
        if request.divided:
            _require_rows(path, leaf, len(request.indices))
            return identified(path, LogicalTensor(leaf, placement=placement, mesh=mesh, notice=notice))
        if leaf.dim() == 0 or leaf.shape[0] != rows:
            return leaf
        local = leaf.narrow(0, placement.start(mesh.rank), placement.lengths[mesh.rank])
        return identified(path, LogicalTensor(local, placement=placement, mesh=mesh, notice=notice, whole=leaf))

    def identified(path: str, tensor: LogicalTensor) -> LogicalTensor:
        # With its place in the batch: else a rank that is given inputs for targets would pass for the others.
        tensor.identity = int.from_bytes(request.digest[:8], "little") ^ zlib.crc32(path.encode())
        return tensor

    return map_leaves(convert, read.data)


def require_agreement(read: BatchRead | Exception | None, *, mesh: Mesh) -> None:
    """Return if all ranks read of one batch, with the same leaves, or all are at their end; else raise DataError
    on every rank. `read` is None at the end, an error if this rank could not read: it is raised by the caller.
    """
    if mesh.size == 1:
        return
    gathered = all_gather_bytes(msgspec.msgpack.encode(_outline(read)), mesh=mesh)
    if isinstance(read, Exception):
        return
    outlines = [msgspec.msgpack.decode(data, type=_Outline) for data in gathered]
    for rank, outline in enumerate(outlines):
        if outline.error:
            raise DataError(
                expected="every rank to read its part of the batch",
                found=f"rank {rank} failed: {outline.error}",
                fix=f"mend what rank {rank} reports",
            )
    for rank, outline in enumerate(outlines):
        if outline.ended != outlines[0].ended:
            raise DataError(
                expected="the same number of batches on every rank",
                found=f"rank {rank} {_at(outline)}, rank 0 {_at(outlines[0])}",
                fix='let the data set and its sampler be the same on every rank, or pass reading="first"',
            )
        if outline.digest != outlines[0].digest:
            raise DataError(
                expected="the same samples in the same order on every rank",
                found=f"rank {rank} has other samples, or another seed, than rank 0",
                fix="draw random numbers alike on every rank, before the loader and in it, or pass a seed; what can "
                'be read only once, as a queue, takes reading="first"',
            )
        if outline.leaves != outlines[0].leaves:
            raise DataError(
                expected=f"the same leaves on every rank, their rows aside; rank 0 has {outlines[0].leaves}",
                found=f"rank {rank} has {outline.leaves}",
                fix='pass reading="replicated": every rank then collates (pads, say) the whole batch',
            )


def lists_in(read: BatchRead) -> bool:
    """Whether a batch holds lists of one plain value per sample, of this rank's samples only."""
    return any(isinstance(leaf, PerSample) for _, leaf in leaves_of(read.data))


def gather_lists(read: BatchRead, *, mesh: Mesh) -> BatchRead:
    """The batch with its lists of plain values whole: a collective operation."""
    named = [(path, leaf) for path, leaf in leaves_of(read.data) if isinstance(leaf, PerSample)]
    for path, leaf in named:
        for value in leaf.values:
            _require_typed(path, value)
    data = encode_value([list(leaf.values) for _, leaf in named])
    ranks = [decode_value(piece) for piece in all_gather_bytes(data, mesh=mesh)]
    wholes = iter([[value for part in parts for value in part] for parts in zip(*ranks, strict=True)])

    def convert(_: str, leaf: Any) -> Any:
        return _Whole(type(leaf.values)(next(wholes))) if isinstance(leaf, PerSample) else leaf

    return replace(read, data=map_leaves(convert, read.data))


class _Whole:
    """A list that is whole already, kept from being taken apart."""

    def __init__(self, values: Any) -> None:
        self.values = values


def _outline(read: BatchRead | Exception | None) -> _Outline:
    if read is None:
        return _Outline(ended=True)
    if isinstance(read, Exception):
        text = str(read.found) if isinstance(read, DataError) else f"{type(read).__name__}: {read}"
        return _Outline(error=text)
    return _Outline(read.request.digest, _outline_of_leaves(read.data) if read.request.divided else [])


def _at(outline: _Outline) -> str:
    return "is at its end" if outline.ended else "has another batch"


def _outline_of_leaves(data: Any) -> list[tuple[str, str]]:
    return [
        (path, f"{leaf.dtype} {list(leaf.shape[1:])}" if isinstance(leaf, Tensor) else type(leaf).__name__)
        for path, leaf in leaves_of(data)
    ]


def _whole_or_refused(path: str, leaf: Any, request: BatchRequest) -> Any:
    if isinstance(leaf, _Whole):
        return leaf.values
    if leaf is None or not request.divided:
        return leaf
    raise DataError(
        expected="batches of tensors, or of lists with one value per sample, of which each rank reads its part",
        found=f"{path}: {type(leaf).__name__} {leaf!r:.60}",
        fix=f"turn it into a tensor in the data set, or {_WHOLE}",
    )


def _require_typed(path: str, value: Any) -> None:
    try:
        encode_value(value)
    except TypeError as error:
        raise DataError(
            expected="numbers, texts, paths and other plain values in a batch's lists, which the ranks exchange",
            found=f"{path}: {error}",
            fix=f"turn it into a tensor in the data set, or {_WHOLE}",
        ) from error


def _require_rows(path: str, leaf: Tensor, rows: int) -> None:
    if leaf.dim() == 0 or leaf.shape[0] != rows:
        raise DataError(
            expected=f"one row per sample in dim 0 of every collated tensor: here {rows}",
            found=f"{path}: shape {list(leaf.shape)}",
            fix=f"put the samples in dim 0 in collate_fn, or {_WHOLE}",
        )
