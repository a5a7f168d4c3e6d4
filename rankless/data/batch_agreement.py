"""Check that all ranks read the same batch, and make its tensors logical."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from torch import Tensor

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.collectives.value_encoding import decode_value, encode_value
from rankless.data.batch_tree import LocalRows, PerSampleValues, count_rows, iterate_leaves, map_leaves
from rankless.data.logical_tensor import GatherMonitor, LogicalTensor
from rankless.data.sample_reader import BatchRead, BatchRequest, ProbeResult
from rankless.data.tensors_on_cpu_ranks import ReaderTensor, ReadTensor
from rankless.errors import DataError
from rankless.parallel.batch_division import BatchDivision
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Shard
from rankless.records.encoding import encode_msgpack

ALL_SAMPLES = (
    "give the loader all samples on every rank, not a share by RANK, rankless.rank() or a DistributedSampler: it gives "
    "each rank its rows"
)
_WHOLE = 'pass reading="replicated": every rank then reads and collates the whole batch'


class _BatchSignature(msgspec.Struct, frozen=True):
    """What must be equal on all ranks: a digest of the whole batch's samples, and each leaf without its rows."""

    digest: bytes = b""
    leaves: list[tuple[str, str]] = []
    is_split: bool = False
    is_probed: bool = False
    reason: str = ""
    """Why every rank must collate the whole batch; see Note [probed collation]."""
    is_random: bool = False
    ended: bool = False
    error: str = ""
    common: bytes = b""
    """See `BatchRead`."""


def make_logical(
    read: BatchRead,
    *,
    mesh: Mesh,
    monitor: GatherMonitor,
    read_whole: Callable[[BatchRequest], BatchRead] | None = None,
) -> Any:
    """Return the batch with logical tensors.

    A batch that is not divided stays plain: every rank then has all of it. See Note [batch division].

    Args:
        read: The batch as this rank has read it.
        mesh: The ranks that have read it.
        monitor: Watches operations that gather it.
        read_whole: Reads all rows of a batch, where a rank may be lost with its rows.
    """
    division = BatchDivision.of(mesh)
    request = read.request
    if mesh.size > 1 and any(isinstance(leaf, ReadTensor) for _, leaf in iterate_leaves(read.data)):
        return map_leaves(partial(_share_leaf, request, mesh, monitor), read.data)
    rows = request.rows if request.rows is not None else count_rows(read.data)
    if division.count == 1 or not division.divides(rows):
        return _take_local_rows(read.data) if mesh.size > 1 else read.data
    placement, own = Shard(0, division.split(rows)), division.own_part

    def convert(path: str, leaf: Any) -> Any:
        if isinstance(leaf, LocalRows):
            return identify(path, LogicalTensor(leaf.local, placement=placement, mesh=mesh, monitor=monitor))
        if not isinstance(leaf, Tensor):
            return _check_plain_leaf(path, leaf, request)
        if request.is_split:
            _require_rows(path, leaf, len(request.indices))
            return identify(path, LogicalTensor(leaf, placement=placement, mesh=mesh, monitor=monitor))
        if leaf.dim() == 0 or leaf.shape[0] != rows:
            return leaf
        local = leaf.narrow(0, placement.start(own), placement.lengths[own])
        return identify(path, LogicalTensor(local, placement=placement, mesh=mesh, monitor=monitor, whole=leaf))

    def identify(path: str, tensor: LogicalTensor) -> LogicalTensor:
        if request.whole is not None and read_whole is not None:
            tensor.read_again = partial(_read_leaf, read_whole, request, path)
        tensor.fingerprint = _identify_leaf(request, path)
        return tensor

    return map_leaves(convert, read.data)


def _take_local_rows(data: Any) -> Any:
    """Return a batch that rank 0 has read and nobody divides, as with an axis `pipeline` alone."""
    if not any(isinstance(leaf, LocalRows) for _, leaf in iterate_leaves(data)):
        return data
    return map_leaves(lambda _, leaf: leaf.local if isinstance(leaf, LocalRows) else leaf, data)


def _share_leaf(request: BatchRequest, mesh: Mesh, monitor: GatherMonitor, path: str, leaf: Any) -> Any:
    """Return a leaf of a batch in a run with heterogeneous workers; see Note [values of heterogeneous workers]."""
    if not isinstance(leaf, ReadTensor):
        return leaf
    is_known = isinstance(leaf.known, Tensor)
    known = leaf.known if isinstance(leaf.known, Tensor) else leaf.known.make_fake()
    tensor = ReaderTensor(known, mesh=mesh, monitor=monitor, has_value=is_known)
    tensor.fingerprint = _identify_leaf(request, path)
    return tensor


def _identify_leaf(request: BatchRequest, path: str) -> int:
    """Return the fingerprint of a tensor of a batch.

    The path is part of it: a rank that passes inputs in place of targets must differ from the others.
    """
    return int.from_bytes(request.digest[:8], "little") ^ zlib.crc32(path.encode())


def _read_leaf(read_whole: Callable[[BatchRequest], BatchRead], request: BatchRequest, path: str) -> Tensor:
    """Return all rows of one tensor of a batch, read again."""
    leaf = dict(iterate_leaves(read_whole(request).data))[path]
    assert isinstance(leaf, Tensor)
    return leaf


def require_same_batch(read: BatchRead | Exception | None, *, mesh: Mesh) -> ProbeResult:
    """Raise `DataError` on every rank unless all ranks read the same batch, or all are at their end.

    `read` is None at the end. If it is an error, this rank could not read: the other ranks raise, and the caller
    raises the error itself. Return the first reason of any rank to collate whole batches.
    """
    if mesh.size == 1:
        return ProbeResult()
    gathered = all_gather_bytes(encode_msgpack(_make_signature(read)), mesh=mesh)
    if isinstance(read, Exception):
        return ProbeResult()
    signatures = [msgspec.msgpack.decode(data, type=_BatchSignature) for data in gathered]
    for rank, signature in enumerate(signatures):
        if signature.error:
            raise DataError(
                expected="every rank to read its rows of the batch",
                found=f"rank {rank} failed: {signature.error}",
                fix=f"correct the error that rank {rank} reports",
            )
    for rank, signature in enumerate(signatures):
        if signature.ended != signatures[0].ended:
            raise DataError(
                expected="the same number of batches on every rank",
                found=f"rank {rank} {_describe_progress(signature)}, rank 0 {_describe_progress(signatures[0])}",
                fix=f'{ALL_SAMPLES}; or pass reading="first"',
            )
        if signature.digest != signatures[0].digest:
            raise DataError(
                expected="the same samples in the same order on every rank",
                found=f"rank {rank} has other samples, or another seed, than rank 0",
                fix=f"{ALL_SAMPLES}; draw the same random numbers on every rank, before the loader and in it, or pass "
                'seed=; for a source that can be read only once, as a queue, pass reading="first"',
            )
        if signature.common and signatures[0].common and signature.common != signatures[0].common:
            raise DataError(
                expected="the same data set on every rank",
                found=f"an index at which rank {rank} has another sample than rank 0",
                fix=f"{ALL_SAMPLES}. Read files in the same order on every rank, such as sorted(os.listdir(folder))",
            )
        if signature.is_split != signatures[0].is_split:
            raise DataError(
                expected="a collate_fn that treats the same samples alike on every rank",
                found=f"rank {rank} collates {'its rows' if signature.is_split else 'whole batches'}, rank 0 does not",
                fix=_WHOLE,
            )
    for signature in signatures:
        if signature.reason:
            return ProbeResult(reason=signature.reason, is_random=signature.is_random)
    return _compare_leaves(signatures)


def _compare_leaves(signatures: list[_BatchSignature]) -> ProbeResult:
    """Return how the ranks' leaves differ, if they may still read whole batches, or raise `DataError`."""
    for rank, signature in enumerate(signatures):
        if signature.leaves != signatures[0].leaves:
            if signature.is_probed:
                pairs = set(signature.leaves) ^ set(signatures[0].leaves)
                leaf = min(path for path, _ in pairs)
                found = " and ".join(
                    f"{dict(signatures[number].leaves).get(leaf, 'nothing')} on rank {number}" for number in (0, rank)
                )
                return ProbeResult(reason=f"{leaf} has rows of {found}")
            raise DataError(
                expected=f"the same leaves on every rank, except for their rows; rank 0 has {signatures[0].leaves}",
                found=f"rank {rank} has {signature.leaves}",
                fix='pass reading="replicated": every rank then collates, for example pads, the whole batch',
            )
    return ProbeResult()


def has_per_sample_lists(read: BatchRead) -> bool:
    """Whether a batch holds lists with one plain value for each of this rank's samples."""
    return any(isinstance(leaf, PerSampleValues) for _, leaf in iterate_leaves(read.data))


def gather_lists(read: BatchRead, *, mesh: Mesh) -> BatchRead:
    """Return the batch with its per-sample lists gathered from all ranks. Collective."""
    named = [(path, leaf) for path, leaf in iterate_leaves(read.data) if isinstance(leaf, PerSampleValues)]
    for path, leaf in named:
        for value in leaf.values:
            _require_typed(path, value)
    data = encode_value([list(leaf.values) for _, leaf in named])
    division = BatchDivision.of(mesh)
    pieces = all_gather_bytes(data, mesh=mesh)
    # Workers with the same part have the same values. Each part counts once.
    ranks = [decode_value(pieces[division.parts_of_workers.index(part)]) for part in range(division.count)]
    wholes = iter([[value for part in parts for value in part] for parts in zip(*ranks, strict=True)])

    def convert(_: str, leaf: Any) -> Any:
        return _GatheredList(type(leaf.values)(next(wholes))) if isinstance(leaf, PerSampleValues) else leaf

    return replace(read, data=map_leaves(convert, read.data))


class _GatheredList:
    """A per-sample list of the whole batch. The class keeps `map_leaves` from descending into it."""

    def __init__(self, values: Any) -> None:
        self.values = values


def _make_signature(read: BatchRead | Exception | None) -> _BatchSignature:
    if read is None:
        return _BatchSignature(ended=True)
    if isinstance(read, Exception):
        text = str(read.found) if isinstance(read, DataError) else f"{type(read).__name__}: {read}"
        return _BatchSignature(error=text)
    request, probe = read.request, read.probe or ProbeResult()
    return _BatchSignature(
        digest=request.digest,
        leaves=_describe_leaves(read.data) if request.is_split else [],
        is_split=request.is_split,
        is_probed=request.division is not None,
        reason=probe.reason,
        is_random=probe.is_random,
        common=read.common,
    )


def _describe_progress(signature: _BatchSignature) -> str:
    return "is at the end of its data" if signature.ended else "has another batch"


def _describe_leaves(data: Any) -> list[tuple[str, str]]:
    return [
        (path, f"{leaf.dtype} {list(leaf.shape[1:])}" if isinstance(leaf, Tensor) else type(leaf).__name__)
        for path, leaf in iterate_leaves(data)
    ]


def _check_plain_leaf(path: str, leaf: Any, request: BatchRequest) -> Any:
    if isinstance(leaf, _GatheredList):
        return leaf.values
    if leaf is None or not request.is_split:
        return leaf
    raise DataError(
        expected="batches of tensors, or of lists with one value per sample: each rank reads its own samples",
        found=f"{path}: {type(leaf).__name__} {leaf!r:.60}",
        fix=f"convert it to a tensor in the data set, or {_WHOLE}",
    )


def _require_typed(path: str, value: Any) -> None:
    try:
        encode_value(value)
    except TypeError as error:
        raise DataError(
            expected="numbers, texts, paths and other plain values in the lists of a batch: ranks exchange them",
            found=f"{path}: {error}",
            fix=f"convert it to a tensor in the data set, or {_WHOLE}",
        ) from error


def _require_rows(path: str, leaf: Tensor, rows: int) -> None:
    if leaf.dim() == 0 or leaf.shape[0] != rows:
        raise DataError(
            expected=f"one row per sample in dim 0 of every collated tensor: here {rows}",
            found=f"{path}: shape {list(leaf.shape)}",
            fix=f"put the samples in dim 0 in collate_fn, or {_WHOLE}",
        )
