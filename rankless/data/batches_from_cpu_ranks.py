"""Batches in a run with heterogeneous workers: the workers on the CPU read them, and say what they are like.

Each heterogeneous worker makes the requests of a pass itself, without reading their samples. So the order, the random
numbers of samplers, the number of batches and the position of the loader are the same on all workers. The first worker
on the CPU sends the structure of each batch, with plain values, and the states of random generators if reading drew.
See Note [values of heterogeneous workers] for the values of tensors.
"""

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rankless.collectives.point_to_point import start_receive, start_send
from rankless.collectives.value_encoding import decode_value, encode_value
from rankless.context.world import World
from rankless.data.batch_tree import map_leaves
from rankless.data.random_generators import (
    ProcessStates,
    encode_changed_states,
    get_process_states,
    take_encoded_states,
)
from rankless.data.sample_reader import BatchRead, BatchRequest
from rankless.data.tensors_on_cpu_ranks import (
    ReadTensor,
    TensorDescription,
    can_be_described,
    find_kinds_axis,
    order_memory_densely,
)
from rankless.errors import DataError
from rankless.parallel.mesh import Mesh, MeshAxis
from rankless.records.encoding import encode_msgpack


class _SharedBatch(msgspec.Struct, frozen=True):
    """What the first worker on the CPU sends to heterogeneous workers of each batch."""

    tree: bytes
    states: list[bytes] | None = None
    """The states of its generators, or None if it drew nothing."""


class RequestReader(Dataset[Any]):
    """The data set of heterogeneous workers: it returns requests, and reads no samples."""

    def __getitem__(self, request: BatchRequest) -> BatchRead:
        """Return the request as a batch without data."""
        return BatchRead(data=None, request=request)


def is_heterogeneous(mesh: Mesh) -> bool:
    """Return whether this worker is heterogeneous."""
    axis = find_kinds_axis(mesh)
    return axis is not None and axis.rank not in axis.stage_workers[0]


def request_ahead(requests: Iterator[BatchRead], count: int) -> Iterator[BatchRead]:
    """Yield requests that are made as many ahead as reader processes make them, so that samplers draw at the same time.

    Args:
        requests: The requests.
        count: How many reader processes have before the first batch.
    """
    ahead = deque(islice(requests, count))
    return _yield_ahead(requests, ahead) if count else requests


def _yield_ahead(requests: Iterator[BatchRead], ahead: deque[BatchRead]) -> Iterator[BatchRead]:
    while ahead:
        first = ahead.popleft()
        ahead.extend(islice(requests, 1))
        yield first


def share_batches(reads: Iterator[BatchRead], *, world: World) -> Iterator[BatchRead]:
    """Yield batches with `ReadTensor` in place of their tensors, on all workers.

    If one of them cannot read a batch, all raise its exception; see Note [failed operations].

    Args:
        reads: The batches as this worker reads them; on heterogeneous workers their requests.
        world: All workers. Another one on the CPU sends if the first one is lost.
    """
    reads_samples = not is_heterogeneous(world.mesh)
    while True:
        may_send = reads_samples and (world.recovery is not None or _is_sender(world.mesh))
        before = get_process_states() if may_send else None
        read = next(reads, None)
        if read is None:
            return
        with world.operations.prepare(world.current.mesh):
            message = None if before is None else _make_message(read, before)
        received = world.run_for_all(partial(_exchange, message))
        if reads_samples:
            yield BatchRead(data=map_leaves(_wrap, read.data), request=read.request, probe=read.probe)
        else:
            yield BatchRead(data=_take_message(received), request=read.request)


def _is_sender(mesh: Mesh) -> bool:
    """Return whether this worker sends what it has read to the heterogeneous ones."""
    axis = find_kinds_axis(mesh)
    return axis is not None and axis.rank == axis.stage_workers[0][0]


def _exchange(message: _SharedBatch | None, world: World) -> _SharedBatch | None:
    """Send a message, or receive it on a heterogeneous worker. Other workers return None. Collective."""
    axis = find_kinds_axis(world.mesh)
    assert axis is not None
    # Tells workers that could not read the batch that this one waits for it.
    world.mesh.check_sync_point("the batch that workers on the CPU read for heterogeneous ones")
    if is_heterogeneous(world.mesh):
        return msgspec.msgpack.decode(_receive_bytes(axis).numpy().tobytes(), type=_SharedBatch)
    if _is_sender(world.mesh):
        assert message is not None
        _send(message, axis)
    return None


def _wrap(_: str, leaf: Any) -> Any:
    return ReadTensor(order_memory_densely(leaf)) if can_be_described(leaf) else leaf


def _make_message(read: BatchRead, before: ProcessStates) -> _SharedBatch:
    """Return the message about a batch."""

    def describe(_: str, leaf: Any) -> Any:
        return TensorDescription.of(order_memory_densely(leaf)) if can_be_described(leaf) else leaf

    try:
        tree = encode_value(map_leaves(describe, read.data))
    except TypeError as error:
        raise DataError(
            expected="batches of tensors and plain values, because workers on the CPU read them for heterogeneous ones",
            found=str(error),
            fix='convert it to tensors, lists and dicts in collate_fn, or pass reading="replicated": every worker then '
            "reads the whole batch",
        ) from error
    return _SharedBatch(tree=tree, states=encode_changed_states(before))


def _send(message: _SharedBatch, axis: MeshAxis) -> None:
    """Send a message to all heterogeneous workers."""
    assert axis.group is not None
    data = torch.frombuffer(bytearray(encode_msgpack(message)), dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
    pending = [
        start_send(part, group=axis.group, target=worker) for worker in axis.stage_workers[1] for part in (size, data)
    ]
    for work in pending:
        work.wait()


def _take_message(message: _SharedBatch | None) -> Any:
    """Return the data of a batch that the first worker on the CPU has read, and take over its generators' states."""
    assert message is not None
    take_encoded_states(message.states)

    def take(_: str, leaf: Any) -> Any:
        return ReadTensor(leaf) if isinstance(leaf, TensorDescription) else leaf

    return map_leaves(take, decode_value(message.tree))


def _receive_bytes(axis: MeshAxis) -> Tensor:
    assert axis.group is not None
    source = axis.stage_workers[0][0]
    size = torch.empty(1, dtype=torch.int64, device="cpu")
    start_receive(size, group=axis.group, source=source).wait()
    data = torch.empty(int(size.item()), dtype=torch.uint8, device="cpu")
    start_receive(data, group=axis.group, source=source).wait()
    return data
