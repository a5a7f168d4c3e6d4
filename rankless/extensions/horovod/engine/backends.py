"""The backends of a process set, which move the values of executed operations.

`open_backend` chooses the fastest one that the ranks, their hosts and the device allow: groups of
`rankless.collectives.backends`, for tensors on the CPU of ranks that share a host, else Gloo and NCCL.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from rankless.collectives.backends.group_failure_errors import Membership
from rankless.collectives.backends.hosts.hosts_group import HostsGroup, open_hosts_group
from rankless.collectives.backends.hosts.process_group import HierarchicalProcessGroup
from rankless.collectives.backends.process_group import SharedMemoryProcessGroup
from rankless.collectives.backends.shared_group import NO_MEMORY, SharedGroup, open_shared_group
from rankless.collectives.value_encoding import view_bytes
from rankless.config.shared_memory_support import Support
from rankless.errors import CollectiveError
from rankless.extensions.horovod.engine.requests import ReduceOpCode

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)}  # fmt: skip

COMBINE_FUNCTIONS: dict[ReduceOpCode, Callable[..., Any]] = {
    ReduceOpCode.AVERAGE: torch.add,
    ReduceOpCode.SUM: torch.add,
    ReduceOpCode.MIN: torch.minimum,
    ReduceOpCode.MAX: torch.maximum,
    ReduceOpCode.PRODUCT: torch.mul,
}


@dataclass(frozen=True)
class ScaledReduction:
    """How the values of `size` ranks are reduced. All methods work in place and return their argument."""

    reduction: ReduceOpCode
    prescale: float
    postscale: float
    size: int

    @property
    def combine(self) -> Callable[..., Any]:
        """The function that combines two values."""
        return COMBINE_FUNCTIONS[self.reduction]

    def apply_prescale(self, tensor: torch.Tensor) -> torch.Tensor:
        """Scale one rank's values before they are combined with others."""
        return scale_in_place(tensor, self.prescale)

    def finish(self, tensor: torch.Tensor) -> torch.Tensor:
        """Divide the combined values for an average, and scale them."""
        if self.reduction is ReduceOpCode.AVERAGE:
            if tensor.dtype.is_floating_point:
                tensor.div_(self.size)
            elif tensor.dtype is not torch.bool:
                tensor.div_(self.size, rounding_mode="trunc")
        return scale_in_place(tensor, self.postscale)


def scale_in_place(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply the tensor by a factor. Integers are truncated toward zero."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor.mul_(factor)
    return tensor.copy_((tensor.double() * factor).trunc_())


REDUCE_OPS: dict[ReduceOpCode, Any] = {
    ReduceOpCode.AVERAGE: dist.ReduceOp.SUM,
    ReduceOpCode.SUM: dist.ReduceOp.SUM,
    ReduceOpCode.MIN: dist.ReduceOp.MIN,
    ReduceOpCode.MAX: dist.ReduceOp.MAX,
    ReduceOpCode.PRODUCT: dist.ReduceOp.PRODUCT,
}
WIDER_DTYPES = {torch.int16: torch.int32, torch.bool: torch.int32}
"""The dtypes in which values are reduced whose own dtype Gloo does not support."""


class ProcessGroupBackend:
    """The collectives of one process set on one kind of device. All tensors are contiguous.

    Args:
        group: torch's group.
        name: The backend's name in a timeline.
        index: The index of this rank in the process set.
        size: The number of ranks.
    """

    def __init__(self, group: Any, *, name: str, index: int, size: int) -> None:
        self.name = name
        self._group = group
        self._index = index
        self._size = size

    def allreduce(self, tensor: torch.Tensor, reduction: ReduceOpCode) -> None:
        """Combine the tensor in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPS[reduction]
        if tensor.dtype in WIDER_DTYPES:
            wider = tensor.to(WIDER_DTYPES[tensor.dtype])
            self._group.allreduce([wider], options).wait()
            tensor.copy_(wider)
        elif tensor.numel():
            self._group.allreduce([tensor], options).wait()

    def allgather(self, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the tensors of all ranks, concatenated. `rows[i]` is the number of rows of the rank at index i."""
        shape = tensor.shape[1:]
        longest = max(rows)
        width = _count_row_bytes(tensor)
        if not width or not longest:
            return tensor.new_empty((sum(rows), *shape))
        sent = tensor.new_zeros(longest * width, dtype=torch.uint8)
        sent[: rows[self._index] * width] = view_bytes(tensor)
        received = sent.new_empty(self._size * longest * width)
        self._group._allgather_base(received, sent).wait()
        pieces = [received[index * longest * width :][: count * width] for index, count in enumerate(rows)]
        return torch.cat(pieces).view(tensor.dtype).reshape(sum(rows), *shape)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the values of the rank at index `root` into every rank's tensor."""
        if not tensor.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._group.broadcast([view_bytes(tensor)], options).wait()

    def alltoall(self, tensor: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> torch.Tensor:
        """Return the rows from all ranks, in their order. The arguments are the row counts for and from each rank."""
        width = _count_row_bytes(tensor)
        output = tensor.new_empty((sum(received_rows), *tensor.shape[1:]))
        if width:
            sent_bytes = [count * width for count in sent_rows]
            received_bytes = [count * width for count in received_rows]
            self._group.alltoall_base(view_bytes(output), view_bytes(tensor), received_bytes, sent_bytes).wait()
        return output

    def close(self, *, is_stuck: bool = False) -> None:
        """End the waits of a thread that is stuck. It gets an error, and the peers may, too."""
        if is_stuck:
            with suppress(Exception):
                self._group.abort()


def open_process_group(
    store: Any, *, index: int, size: int, device: torch.device, timeout: timedelta
) -> ProcessGroupBackend:
    """Return a new group of the ranks that open it at the same store: NCCL if each has a GPU of its own, else Gloo."""
    is_nccl = device.type == "cuda" and _has_gpu_of_its_own(store, index, size, device)
    group_class: Any = dist.ProcessGroupNCCL if is_nccl else dist.ProcessGroupGloo
    group = group_class(store, index, size, timeout)
    return ProcessGroupBackend(group, name="NCCL" if is_nccl else "GLOO", index=index, size=size)


def _has_gpu_of_its_own(store: Any, index: int, size: int, device: torch.device) -> bool:
    """Return whether no two ranks use one GPU, which NCCL refuses. All ranks call this."""
    store.set(f"gpu/{index}", str(torch.cuda.get_device_properties(device).uuid))
    return len({bytes(store.get(f"gpu/{rank}")) for rank in range(size)}) == size


def _count_row_bytes(tensor: torch.Tensor) -> int:
    count = 1
    for size in tensor.shape[1:]:
        count *= size
    return count * tensor.element_size()


class SharedMemoryBackend:
    """The collectives of one process set whose ranks share a host, or hosts. All tensors are contiguous, on the CPU.

    All methods raise `CollectiveError` if another rank ends, leaves or is late, and then on all ranks.

    Args:
        group: What the ranks have opened together. `close` closes it.
    """

    def __init__(self, group: SharedMemoryProcessGroup) -> None:
        self._group = group
        self._index, self._size = group.rank(), group.size()
        self._is_hierarchical = isinstance(group, HierarchicalProcessGroup)
        self.name = "HIERARCHICAL" if self._is_hierarchical else "SHARED_MEMORY"
        """The backend's name in a timeline."""

    def allreduce(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], reduction: ScaledReduction
    ) -> None:
        """Combine the inputs of all ranks into the outputs. All have the same dtype."""
        operation, finish = _choose_operation(inputs[0].dtype, reduction)
        with self._abort_if_it_fails():
            self._group.all_reduce_fused(inputs, outputs, operation, before=reduction.apply_prescale, after=finish)

    def reducescatter(self, tensor: torch.Tensor, reduction: ScaledReduction) -> torch.Tensor:
        """Combine the tensors of all ranks, and return this rank's rows. The first ranks get one row more."""
        rows, remainder = divmod(tensor.shape[0], self._size)
        scaled = tensor if reduction.prescale == 1.0 else reduction.apply_prescale(tensor.clone())
        parts = list(scaled.split([rows + (index < remainder) for index in range(self._size)]))
        output = torch.empty_like(parts[self._index])
        operation, finish = _choose_operation(tensor.dtype, reduction)
        options = dist.ReduceScatterOptions()
        options.reduceOp = operation
        self._run(self._group.reduce_scatter, [output], [parts], options)
        finish(output)
        return output

    def allgather(self, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the tensors of all ranks, concatenated. `rows[i]` is the number of rows of the rank at index i."""
        output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        self._run(self._group.allgather, [list(output.split(list(rows)))], [tensor], AllgatherOptions())
        return output

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the values of the rank at index `root` into every rank's tensor."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._run(self._group.broadcast, [tensor], options)

    def alltoall(self, tensor: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> torch.Tensor:
        """Return the rows from all ranks, in their order. The arguments are the row counts for and from each rank."""
        output = tensor.new_empty((sum(received_rows), *tensor.shape[1:]))
        options = AllToAllOptions()
        self._run(self._group.all_to_all_single, output, tensor, list(received_rows), list(sent_rows), options)
        return output

    def close(self, *, is_stuck: bool = False) -> None:
        """Leave the group. A thread of this rank that waits in it gets an error."""
        if is_stuck and self._is_hierarchical:
            self._group.abort()  # its connections would wait for their timeout
        self._group.shutdown()

    def _run(self, collective: Callable[..., Any], *arguments: Any) -> None:
        """Run a collective in this thread. The last argument is its options."""
        arguments[-1].asyncOp = False
        with self._abort_if_it_fails():
            collective(*arguments)

    @contextmanager
    def _abort_if_it_fails(self) -> Iterator[None]:
        """End the group on all ranks if an operation fails: this rank may be the only one that knows of it."""
        try:
            yield
        except CollectiveError:
            self._group.abort()
            raise


def _choose_operation(
    dtype: torch.dtype, reduction: ScaledReduction
) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the group's operation, and what then remains to be done with its result."""
    if reduction.reduction is ReduceOpCode.AVERAGE and dtype.is_floating_point:
        return dist.ReduceOp.AVG, lambda values: scale_in_place(values, reduction.postscale)
    return REDUCE_OPS[reduction.reduction], reduction.finish


FLAT = "HOROVOD_HIERARCHICAL_ALLREDUCE=0"
Backend = SharedMemoryBackend | ProcessGroupBackend


@dataclass(frozen=True, kw_only=True)
class BackendRequest:
    """What the ranks of a process set need to know to open a backend together.

    Attributes:
        name: The process set and the kind of device, in words.
        store: A `torch.distributed.Store` with keys of its own for this backend.
        rank: This process's rank in the job.
        members: The ranks of the process set, in order.
        hosts: The host of each of them. Ranks of one host share memory.
        timeout: How long the ranks wait for each other, here and in each operation.
        watch: Called now and then during waits. It raises a `CollectiveError` if a peer is gone.
        reduces_by_hosts: Whether ranks of several hosts reduce within their hosts first.
    """

    name: str
    store: Any
    rank: int
    members: Sequence[int]
    hosts: Sequence[str]
    timeout: timedelta
    watch: Callable[[], None]
    reduces_by_hosts: bool

    @property
    def index(self) -> int:
        """The index of this rank in the process set."""
        return self.members.index(self.rank)

    def can_share_memory(self, device: torch.device) -> bool:
        """Whether two of the ranks have tensors in the memory of one host."""
        return device.type == "cpu" and len(set(self.hosts)) < len(self.members)

    @property
    def membership(self) -> Membership:
        """The place of this rank in the process set."""
        return Membership(
            rank=self.index,
            global_ranks=tuple(self.members),
            timeout_seconds=self.timeout.total_seconds(),
            timeout_name="HOROVOD_GLOO_TIMEOUT_SECONDS",
        )


def open_backend(request: BackendRequest, device: torch.device, *, notify: Callable[[str], None]) -> Backend:
    """Open the backend for a process set and a kind of device. All its ranks call this.

    `notify` is called on the first rank with the reason if a host has no memory to share.

    Raises:
        CollectiveError: A rank does not call this within the timeout, or is gone.
        RuntimeError: The ranks cannot connect to each other.
    """
    if request.can_share_memory(device):
        opened = _open_group(request)
        if isinstance(opened, SharedGroup | HostsGroup):
            return _make_backend(request, opened)
        is_known = FLAT in opened.reason or (opened is not NO_MEMORY and len(set(request.hosts)) == 1)
        if request.index == 0 and not is_known:
            notify(f"hvd: tensors on the CPU use Gloo instead of shared memory: {opened.reason}")
    return open_process_group(
        request.store, index=request.index, size=len(request.members), device=device, timeout=request.timeout
    )


def _open_group(request: BackendRequest) -> SharedGroup | HostsGroup | Support:
    store = dist.PrefixStore("shared memory", request.store)  # type: ignore[attr-defined]  # not in the stubs
    if len(set(request.hosts)) == 1:
        return open_shared_group(store, request.membership, request.timeout, check=request.watch)
    return open_hosts_group(
        store,
        request.membership,
        request.timeout,
        objection="" if request.reduces_by_hosts else FLAT,
        host=request.hosts[request.index],
        check=request.watch,
    )


def _make_backend(request: BackendRequest, opened: SharedGroup | HostsGroup) -> SharedMemoryBackend:
    opened.signals.watch = request.watch
    store, member, name = request.store, request.membership, request.name
    if isinstance(opened, HostsGroup):
        return SharedMemoryBackend(HierarchicalProcessGroup(store, member, opened, name))
    return SharedMemoryBackend(SharedMemoryProcessGroup(store, member, opened, name))
