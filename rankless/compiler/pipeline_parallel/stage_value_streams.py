"""Send values from stage to stage: one stream for each pair of workers, in the order of the sender.

Note [described values]: a receiver knows most values before they come, by the program. Of others, such as sparse
gradients and sums within an operator, the sender first sends a header of fixed length with the dtype, the shape, and
the number of sparse dims.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rankless.collectives.checked_collective_queue import PendingWork
from rankless.collectives.point_to_point import start_receive, start_send
from rankless.compiler.ir.memory_order import order_memory, repeat_memory
from rankless.parallel.mesh import MeshAxis

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
"""The dtypes of values with a header, by number."""
HEADER_LENGTH = 16
Key = Hashable
"""Names a value that is sent in a step."""


@dataclass(frozen=True)
class TransferredValue:
    """A value that one worker sends to another.

    Attributes:
        shape (tuple[int | None, ...]): Its shape, with None for a number of selected rows, which the sender knows.
        device (torch.device): Where the receiver needs it.
        order (tuple[int, ...] | None): The order of its dims in memory; None if it is contiguous.
        repeated (tuple[int, ...]): Dims along which it repeats one row without memory for each.
        is_number (bool): Whether it is a number of Python, or a list of numbers, and is sent as a tensor of integers.
        has_header (bool): Whether the sender describes it; see Note [described values].
    """

    key: Key
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...] | None = None
    repeated: tuple[int, ...] = ()
    is_number: bool = False
    has_header: bool = False

    def require_shape(self) -> list[int]:
        """Return the shape of a value that has no number of selected rows as a size."""
        known = [size for size in self.shape if size is not None]
        assert len(known) == len(self.shape), self
        return known


class Transport(Protocol):
    """Moves tensors between the workers of a pipeline."""

    def send(self, value: Tensor, target: int) -> None:
        """Send a tensor to a worker, without waiting for it."""
        ...

    def receive(self, out: Tensor, source: int) -> None:
        """Receive a tensor from a worker into memory, and wait."""
        ...

    def finish(self) -> None:
        """Wait until everything is sent."""
        ...


class GroupTransport:
    """Moves tensors in the process group of the axis.

    Heterogeneous workers may be on other devices than those to which they send, so what they send lies on the host.
    """

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis
        self._sends_from_host = bool(axis.stage_workers)
        self._pending: list[tuple[PendingWork, Tensor]] = []

    def send(self, value: Tensor, target: int) -> None:
        """Send a tensor to a worker, without waiting for it."""
        # What has been sent needs its memory no more.
        self._pending = [item for item in self._pending if not item[0].is_completed()]
        assert self._axis.group is not None
        if self._sends_from_host:
            value = value.cpu()
        self._pending.append((start_send(value, group=self._axis.group, target=target), value))

    def receive(self, out: Tensor, source: int) -> None:
        """Receive a tensor from a worker into memory, and wait."""
        assert self._axis.group is not None
        memory = torch.empty_like(out, device="cpu") if self._sends_from_host and not out.is_cpu else out
        start_receive(memory, group=self._axis.group, source=source).wait()
        if memory is not out:
            out.copy_(memory)

    def finish(self) -> None:
        """Wait until everything is sent."""
        pending, self._pending = self._pending, []
        for work, _ in pending:
            work.wait()


class Streams:
    """Sends and receives the values of one step of one worker.

    Args:
        expected: For each other worker what it sends to this one in a step, in order.
    """

    def __init__(self, transport: Transport, expected: Mapping[int, Sequence[TransferredValue]]) -> None:
        self._transport = transport
        self._expected = {source: list(reversed(values)) for source, values in expected.items()}
        self._received: dict[tuple[int, Key], Any] = {}

    def send(self, value: Any, target: int, described: TransferredValue) -> None:
        """Send a value, after its shape if the receiver does not know it."""
        if described.has_header:
            self._send_with_header(value, target)
            return
        if described.is_number:
            value = torch.tensor(value, dtype=described.dtype, device=described.device)
        if None in described.shape:  # the receiver needs the number of selected rows first
            self._transport.send(torch.tensor(value.shape, device=described.device), target)
        if value.numel():
            self._transport.send(value.contiguous(), target)

    def receive(self, key: Key, source: int) -> Any:
        """Return a value that another worker sends. What it sends before is kept for later."""
        while (source, key) not in self._received:
            described = self._expected[source].pop()
            if described.has_header:
                self._received[source, described.key] = self._receive_with_header(source, described.device)
                continue
            shape: Sequence[Any] = described.shape
            if None in shape:
                sizes = torch.empty(len(shape), dtype=torch.int64, device=described.device)
                self._transport.receive(sizes, source)
                shape = sizes.tolist()
            value: Any = torch.empty(shape, dtype=described.dtype, device=described.device)
            if value.numel():
                self._transport.receive(value, source)
            if described.repeated:
                value = repeat_memory(value, described.repeated, described.order)
            elif described.order is not None:
                value = order_memory(value, described.order)
            self._received[source, described.key] = value.tolist() if described.is_number else value
        return self._received.pop((source, key))

    def _send_with_header(self, value: Tensor, target: int) -> None:
        """Send a value that the receiver does not know; see Note [described values]."""
        sparse_dims = value.sparse_dim() if value.is_sparse else 0
        header = [DTYPES.index(value.dtype), sparse_dims, value.dim(), *value.shape]
        assert len(header) <= HEADER_LENGTH, f"{value.dim()} dims"
        header += [0] * (HEADER_LENGTH - len(header))
        self._transport.send(torch.tensor(header, device=value.device), target)
        if value.is_sparse:
            for part in (value._indices(), value._values()):
                self._send_with_header(part, target)
        elif value.numel():
            self._transport.send(value.contiguous(), target)

    def _receive_with_header(self, source: int, device: torch.device) -> Tensor:
        """Receive a value that the sender describes."""
        header = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=device)
        self._transport.receive(header, source)
        dtype, sparse_dims, dims, *sizes = header.tolist()
        if sparse_dims:
            indices, values = (self._receive_with_header(source, device) for _ in range(2))
            return torch.sparse_coo_tensor(indices, values, sizes[:dims], check_invariants=False)
        value = torch.empty(sizes[:dims], dtype=DTYPES[dtype], device=device)
        if value.numel():
            self._transport.receive(value, source)
        return value
