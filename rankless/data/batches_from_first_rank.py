"""Rank 0 reads and distributes each batch, for a source that only one process can read, as a socket or a queue.

Note [random state of the first rank]: rank 0 reads as a plain `DataLoader` does and draws from the process's
generators. The other ranks draw nothing. Whenever rank 0 drew, it sends its generators' states with the batch. All
ranks then hold the same states, so the script's next draws agree.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from rankless.collectives.byte_messages import broadcast_bytes
from rankless.collectives.mesh_collectives import scatter
from rankless.collectives.value_encoding import decode_value, encode_value
from rankless.data.batch_tree import LocalRows, count_rows, map_leaves
from rankless.data.random_generators import (
    ProcessStates,
    encode_changed_states,
    get_process_states,
    take_encoded_states,
)
from rankless.data.sample_reader import BatchRead, BatchRequest, ReadFailure
from rankless.errors import DataError
from rankless.parallel.batch_division import BatchDivision
from rankless.parallel.mesh import Mesh
from rankless.records.encoding import encode_msgpack


class _TensorHeader(msgspec.Struct, frozen=True):
    """Stands in the batch for a tensor with one row per sample, which rank 0 scatters separately."""

    dtype: torch.dtype
    row_shape: tuple[int, ...]


class _BatchMessage(msgspec.Struct, frozen=True):
    """What rank 0 broadcasts before each batch, and at the end."""

    states: list[bytes] | None = None
    """The states of rank 0's generators, or None if it drew nothing."""
    tree: bytes = b""
    rows: int = 0
    digest: bytes = b""
    ended: bool = False
    error: str = ""


def sync_generators(before: ProcessStates, *, mesh: Mesh) -> None:
    """Set all ranks' generators to rank 0's states, if rank 0 drew since `before`. Collective."""
    _broadcast_message(_BatchMessage(states=encode_changed_states(before)), mesh)


def distribute_from_first_rank(batches: Iterator[Any], *, mesh: Mesh) -> Iterator[BatchRead]:
    """Yield on every rank the batches that rank 0 reads from `batches`.

    Each rank gets its own rows, or the whole batch if it has fewer rows than ranks. Every `next` is a collective
    operation. If rank 0 fails to read, all ranks raise.
    """
    while True:
        if mesh.rank != 0:
            message = _broadcast_message(None, mesh)
            if message.ended:
                return
            yield _assemble_batch(message, decode_value(message.tree), mesh)
            continue
        before = get_process_states()
        try:
            read = next(batches, None)
            if isinstance(read, ReadFailure):
                raise read.as_error()
            tree, message = _make_message(read, before, mesh)
        except Exception as error:  # user code may raise anything; the other ranks raise too
            _broadcast_message(
                _BatchMessage(error=str(getattr(error, "found", f"{type(error).__name__}: {error}"))), mesh
            )
            raise
        _broadcast_message(message, mesh)
        if read is None:
            return
        yield _assemble_batch(message, tree, mesh)


def _make_message(read: BatchRead | None, before: ProcessStates, mesh: Mesh) -> tuple[Any, _BatchMessage]:
    """Return the batch as rank 0 keeps it, and the message that announces it."""
    if read is None:
        return None, _BatchMessage(states=encode_changed_states(before), ended=True)
    rows = read.request.rows if read.request.rows is not None else count_rows(read.data)
    is_scattered = BatchDivision.of(mesh).divides(rows)

    def make_header(_: str, leaf: Any) -> Any:
        with_rows = is_scattered and isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
        return _TensorHeader(leaf.dtype, tuple(leaf.shape[1:])) if with_rows else leaf

    try:
        tree = encode_value(map_leaves(make_header, read.data))
    except TypeError as error:
        raise DataError(
            expected="batches of tensors and plain values, because rank 0 sends them to the other ranks",
            found=str(error),
            fix='convert it to tensors, lists and dicts in collate_fn, or pass reading="split"',
        ) from error
    message = _BatchMessage(states=encode_changed_states(before), tree=tree, rows=rows, digest=read.request.digest)
    return read.data, message


def _assemble_batch(message: _BatchMessage, tree: Any, mesh: Mesh) -> BatchRead:
    """Return the batch with this rank's rows in place of headers. On rank 0 `tree` still holds the tensors."""
    rows = message.rows
    division = BatchDivision.of(mesh)
    if not division.divides(rows):
        whole = BatchRequest(indices=range(rows), rows=rows, is_split=False, digest=message.digest)
        return BatchRead(data=tree, request=whole)

    def insert_rows(_: str, leaf: Any) -> Any:
        if isinstance(leaf, _TensorHeader):
            return LocalRows(_scatter_rows(None, leaf, rows, mesh))
        if mesh.rank == 0 and isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows:
            return LocalRows(_scatter_rows(leaf, _TensorHeader(leaf.dtype, tuple(leaf.shape[1:])), rows, mesh))
        return leaf

    own_rows = division.split(rows)[division.own_part]
    request = BatchRequest(indices=range(own_rows), rows=rows, is_split=False, digest=message.digest)
    return BatchRead(data=map_leaves(insert_rows, tree), request=request)


def _scatter_rows(whole: Tensor | None, row: _TensorHeader, rows: int, mesh: Mesh) -> Tensor:
    """Return this rank's rows. They travel as bytes, because every backend supports bytes."""
    division = BatchDivision.of(mesh)
    parts = division.split(rows)
    lengths = [parts[part] for part in division.parts_of_workers]
    width = torch.Size(row.row_shape).numel() * row.dtype.itemsize
    if width == 0:
        return torch.empty((lengths[mesh.rank], *row.row_shape), dtype=row.dtype, device="cpu")
    data = torch.empty((0, width), dtype=torch.uint8, device="cpu")
    if whole is not None:
        plain = whole.detach().resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(plain.shape[0], -1).view(torch.uint8)
        if division.count < mesh.size:
            pieces = data.split(list(parts))
            data = torch.cat([pieces[part] for part in division.parts_of_workers])
    own = scatter(data.to(mesh.device), among=mesh, lengths=lengths).cpu()
    return own.view(row.dtype).reshape(lengths[mesh.rank], *row.row_shape)


def _broadcast_message(message: _BatchMessage | None, mesh: Mesh) -> _BatchMessage:
    """Broadcast rank 0's message. Other ranks raise its error and take over its generators' states."""
    data = b"" if message is None else encode_msgpack(message)
    received = msgspec.msgpack.decode(broadcast_bytes(data, mesh=mesh), type=_BatchMessage)
    if mesh.rank != 0 and received.error:
        raise DataError(
            expected="rank 0 to read the batch and send it",
            found=f"rank 0 failed: {received.error}",
            fix="correct the error that rank 0 reports",
        )
    if mesh.rank != 0:
        take_encoded_states(received.states)
    return received
