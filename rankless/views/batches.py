"""From what a rank has read to what the script gets: plain tensors, or logical ones once all ranks agree."""

from typing import Any

import msgspec
from torch import Tensor
from torch.utils._pytree import KeyPath, keystr, tree_flatten_with_path, tree_map_with_path

from rankless.collectives.mesh import Mesh
from rankless.collectives.messages import all_gather_bytes
from rankless.errors import DataError
from rankless.program.placement import Shard, split_lengths
from rankless.views.logical import GatherNotice, LogicalTensor
from rankless.views.reading import BatchRead, BatchRequest


class _Outline(msgspec.Struct, frozen=True):
    """What must be equal on all ranks: which samples the whole batch has, and each leaf but for its rows."""

    digest: bytes
    leaves: list[tuple[str, str]]


def make_logical(read: BatchRead, *, mesh: Mesh, notice: GatherNotice) -> Any:
    """The batch with its tensors logical; whole and plain if it has fewer rows than there are workers."""
    request = read.request
    if mesh.size == 1 or request.rows < mesh.size:
        return read.data
    placement = Shard(0, split_lengths(request.rows, mesh.size))

    def convert(path: KeyPath, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return _whole_or_refused(path, leaf, request)
        if request.divided:
            _require_rows(path, leaf, len(request.indices))
            return identified(LogicalTensor(leaf, placement=placement, mesh=mesh, notice=notice))
        if leaf.dim() == 0 or leaf.shape[0] != request.rows:
            return leaf
        local = leaf.narrow(0, placement.start(mesh.rank), placement.lengths[mesh.rank])
        return identified(LogicalTensor(local, placement=placement, mesh=mesh, notice=notice, whole=leaf))

    def identified(tensor: LogicalTensor) -> LogicalTensor:
        tensor.identity = int.from_bytes(request.digest[:8], "little")
        return tensor

    return tree_map_with_path(convert, read.data)


def require_agreement(read: BatchRead, *, mesh: Mesh) -> None:
    """Return if all ranks read of one batch, with the same leaves; else raise DataError on every rank."""
    if mesh.size == 1:
        return
    leaves = [] if not read.request.divided else _outline_of_leaves(read.data)
    mine = _Outline(read.request.digest, leaves)
    gathered = all_gather_bytes(msgspec.msgpack.encode(mine), mesh=mesh)
    outlines = [msgspec.msgpack.decode(data, type=_Outline) for data in gathered]
    for rank, outline in enumerate(outlines):
        if outline.digest != outlines[0].digest:
            raise DataError(
                expected="the same samples in the same order on every rank",
                found=f"rank {rank} has other samples, or another seed, than rank 0",
                fix="draw random numbers alike on every rank, before the loader and in it, or pass a seed",
            )
        if outline.leaves != outlines[0].leaves:
            raise DataError(
                expected=f"the same leaves on every rank, their rows aside; rank 0 has {outlines[0].leaves}",
                found=f"rank {rank} has {outline.leaves}",
                fix='pass reading="replicated": every rank then collates (pads, say) the whole batch',
            )


def _outline_of_leaves(data: Any) -> list[tuple[str, str]]:
    return [
        (
            _name(path),
            f"{leaf.dtype} {list(leaf.shape[1:])}" if isinstance(leaf, Tensor) else type(leaf).__name__,
        )
        for path, leaf in tree_flatten_with_path(data)[0]
    ]


def _whole_or_refused(path: KeyPath, leaf: Any, request: BatchRequest) -> Any:
    if leaf is None or not request.divided:
        return leaf
    raise DataError(
        expected="batches of tensors, which can be split over the workers",
        found=f"{_name(path)}: {type(leaf).__name__} {leaf!r:.60}",
        fix='turn it into a tensor in the data set, or pass reading="replicated" to have it whole',
    )


def _require_rows(path: KeyPath, leaf: Tensor, rows: int) -> None:
    if leaf.dim() == 0 or leaf.shape[0] != rows:
        raise DataError(
            expected=f"one row per sample in dim 0 of every collated tensor: here {rows}",
            found=f"{_name(path)}: shape {list(leaf.shape)}",
            fix='put the samples in dim 0 in collate_fn, or pass reading="replicated" to collate the whole',
        )


def _name(path: KeyPath) -> str:
    return f"batch{keystr(path)}"
