"""Rank 0 reads and sends: for what cannot be read by every rank, as a socket, a queue or a file on one host.

Note [as one device reads]: rank 0 reads as a plain DataLoader does and draws its random numbers from the running
generators. The others draw nothing, so whenever rank 0 has drawn, its generators' states travel with the message:
afterwards the generators are alike again, and what the script draws next is the same everywhere.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from rankless.collectives.byte_messages import broadcast_bytes
from rankless.collectives.tensor_collectives import scatter
from rankless.collectives.typed_values import decode_value, encode_value
from rankless.data.batch_tree import LocalRows, count_rows, map_leaves
from rankless.data.generators import (
    ProcessStates,
    find_changed_generators,
    from_plain,
    get_process_states,
    set_process_states,
    to_plain,
)
from rankless.data.sample_reader import BatchRead, BatchRequest, ReadFailure
from rankless.errors import DataError
from rankless.parallel.mesh import Mesh
from rankless.parallel.placement import split_lengths


class _TensorHeader(msgspec.Struct, frozen=True):
    """In the place of a tensor with one row per sample, which follows in pieces."""

    dtype: torch.dtype
    row_shape: tuple[int, ...]


class _BatchMessage(msgspec.Struct, frozen=True):
    """What rank 0 says before each batch, or at the end."""

    states: list[bytes] | None = None
    """Of its generators, where it has drawn."""
    tree: bytes = b""
    rows: int = 0
    digest: bytes = b""
    ended: bool = False
    error: str = ""


def sync_generators(before: ProcessStates, *, mesh: Mesh) -> None:
    """Set all ranks' generators to rank 0's, if it has drawn since `before`: a collective operation."""
    _broadcast_message(_BatchMessage(states=_encode_changed_states(before)), mesh)


def distribute_from_first_rank(batches: Iterator[Any], *, mesh: Mesh) -> Iterator[BatchRead]:
    """The batches that rank 0 reads from `batches`, on every rank: its own rows, or all of a batch of too few rows.

    Every `next` is a collective operation. What rank 0 fails to read is raised on every rank.
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
        except Exception as error:  # foreign code; the others hear of it before it goes on here
            _broadcast_message(
                _BatchMessage(error=str(getattr(error, "found", f"{type(error).__name__}: {error}"))), mesh
            )
            raise
        _broadcast_message(message, mesh)
        if read is None:
            return
        yield _assemble_batch(message, tree, mesh)


def _make_message(read: BatchRead | None, before: ProcessStates, mesh: Mesh) -> tuple[Any, _BatchMessage]:
    """The batch as rank 0 keeps it, and the message that goes before it."""
    if read is None:
        return None, _BatchMessage(states=_encode_changed_states(before), ended=True)
    rows = read.request.rows if read.request.rows is not None else count_rows(read.data)
    apart = rows >= mesh.size

    def marked(_: str, leaf: Any) -> Any:
        with_rows = apart and isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
        return _TensorHeader(leaf.dtype, tuple(leaf.shape[1:])) if with_rows else leaf

    try:
        tree = encode_value(map_leaves(marked, read.data))
    except TypeError as error:
        raise DataError(
            expected="batches of tensors and plain values, which rank 0 can send to the others",
            found=str(error),
            fix='turn it into tensors, lists and dicts in collate_fn, or pass reading="split"',
        ) from error
    message = _BatchMessage(states=_encode_changed_states(before), tree=tree, rows=rows, digest=read.request.digest)
    return read.data, message


def _assemble_batch(message: _BatchMessage, tree: Any, mesh: Mesh) -> BatchRead:
    """A batch with this rank's rows in the place of marks; on rank 0 `tree` holds the tensors themselves."""
    rows = message.rows
    if rows < mesh.size:
        whole = BatchRequest(indices=range(rows), rows=rows, is_split=False, digest=message.digest)
        return BatchRead(data=tree, request=whole)
    lengths = split_lengths(rows, mesh.size)

    def placed(_: str, leaf: Any) -> Any:
        if isinstance(leaf, _TensorHeader):
            return LocalRows(_scatter_rows(None, leaf, lengths, mesh))
        if mesh.rank == 0 and isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows:
            return LocalRows(_scatter_rows(leaf, _TensorHeader(leaf.dtype, tuple(leaf.shape[1:])), lengths, mesh))
        return leaf

    request = BatchRequest(indices=range(lengths[mesh.rank]), rows=rows, is_split=False, digest=message.digest)
    return BatchRead(data=map_leaves(placed, tree), request=request)


def _scatter_rows(whole: Tensor | None, row: _TensorHeader, lengths: tuple[int, ...], mesh: Mesh) -> Tensor:
    """This rank's rows. They travel as bytes, which every backend knows."""
    width = torch.Size(row.row_shape).numel() * row.dtype.itemsize
    if width == 0:
        return torch.empty((lengths[mesh.rank], *row.row_shape), dtype=row.dtype)
    data = torch.empty((0, width), dtype=torch.uint8)
    if whole is not None:
        plain = whole.detach().resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(plain.shape[0], -1).view(torch.uint8)
    own = scatter(data.to(mesh.device), mesh=mesh, lengths=lengths).cpu()
    return own.view(row.dtype).reshape(lengths[mesh.rank], *row.row_shape)


def _broadcast_message(message: _BatchMessage | None, mesh: Mesh) -> _BatchMessage:
    """Rank 0's message; on the other ranks its error is raised, its generators' states are taken over."""
    data = b"" if message is None else msgspec.msgpack.encode(message)
    received = msgspec.msgpack.decode(broadcast_bytes(data, mesh=mesh), type=_BatchMessage)
    if mesh.rank != 0 and received.error:
        raise DataError(
            expected="rank 0 to read the batch and send it",
            found=f"rank 0 failed: {received.error}",
            fix="mend what rank 0 reports",
        )
    if mesh.rank != 0 and received.states is not None:
        torch_state, numpy_state, python_state = (from_plain(decode_value(state)) for state in received.states)
        set_process_states((torch_state, numpy_state, python_state))
    return received


def _encode_changed_states(before: ProcessStates) -> list[bytes] | None:
    """The generators' states, if any of them has been drawn from."""
    now = get_process_states()
    return [encode_value(to_plain(state)) for state in now] if find_changed_generators(before, now) else None
