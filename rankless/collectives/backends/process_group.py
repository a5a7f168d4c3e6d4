"""A `torch.distributed` process group whose collectives run in memory that the processes of one host share.

`torch.distributed`'s functions, DistributedDataParallel and FSDP2 call the methods below, under torch's names. Each
checks its arguments, and then runs as an operation of the group's queue: in order with all others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankless.collectives.backends.call_arguments import (
    as_list,
    as_only_list,
    get_operation,
    get_root,
    require_count,
    require_dense,
    require_one_dtype,
    require_other_rank,
    require_values,
    split_bytes,
)
from rankless.collectives.backends.group_failure import FailureKind, Membership, encode_failure, make_error
from rankless.collectives.backends.operation_queue import SharedMemoryWork
from rankless.collectives.backends.reductions import view_as_reducible
from rankless.collectives.backends.shared_group import SharedGroup
from rankless.collectives.backends.tensor_views import flatten, flatten_bytes, writable, write_back

BACKEND_NAME = "shared_memory"
_ProcessGroup: Any = dist.ProcessGroup
"""torch's stubs give several signatures to most methods. torch itself calls only those below."""


class SharedMemoryProcessGroup(_ProcessGroup):  # type: ignore[misc]  # its base is Any, see above
    """A process group of ranks of one host. `make_shared_memory_group` makes it.

    It takes dense tensors on the CPU of every dtype, shape and stride; empty ones too. A collective combines values in
    the order of ranks, so all ranks get the same bits. If a rank ends, aborts, is late or makes another call, all
    ranks raise `CollectiveError`, and the group cannot be used any more.

    Args:
        store: The store through which the ranks met.
        member: This process's place in the group.
        shared: The shared memory. `shutdown` closes it.
        name: The name of the group, equal on all ranks.
    """

    def __init__(self, store: Any, member: Membership, shared: SharedGroup, name: str) -> None:
        super().__init__(member.rank, member.size)
        self._store, self._member, self._name = store, member, name
        self._description = BACKEND_NAME
        self._shared: SharedGroup | None = shared

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """Return a flat tensor in the group's memory, filled with zeros.

        `all_reduce` of exactly this tensor copies nothing into shared memory. All ranks call this in the same order,
        with the same arguments. The memory is free when the group is closed and the tensor is gone.

        Args:
            count: The number of values.
            dtype: Their dtype.

        Returns:
            The tensor. None on all ranks if there is no memory.

        Raises:
            CollectiveError: The group cannot be used, or a rank does not call this within the group's timeout.
        """
        return self._open.allocate(count, dtype)

    def abort(self) -> None:
        """End the group on all ranks. All waits raise `CollectiveError` at once."""
        if self._shared is not None:
            self._shared.abort()

    def shutdown(self) -> None:
        """Leave the group, and release its memory, descriptors and threads. A second call does nothing."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def allreduce(self, tensors: Any, opts: Any = dist.ReduceOp.SUM, timeout: Any = None) -> SharedMemoryWork:
        """Reduce the tensor over all ranks, in place."""
        (tensor,) = as_list(tensors)
        return self.allreduce_coalesced([tensor], opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = dist.ReduceOp.SUM) -> SharedMemoryWork:
        """Reduce several tensors of one dtype over all ranks, each in place."""
        shared, operation = self._open, get_operation(opts)
        require_dense(tensors)
        require_one_dtype(tensors)
        views = [view_as_reducible(tensor, operation) for tensor in tensors]
        reduction = shared.reductions.get_reduction(operation, views[0].dtype)

        def run() -> None:
            if len(views) == 1:
                flat = flatten(views[0])
                shared.reductions.all_reduce(flat, reduction)
                write_back(views[0], flat)
                return
            flat = torch.cat([flatten(view) for view in views])
            shared.reductions.all_reduce(flat, reduction)
            for view, part in zip(views, flat.split([view.numel() for view in views]), strict=True):
                view.detach().copy_(part.view(view.shape))

        return self._execute(run, views, list(tensors), opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> SharedMemoryWork:
        """Copy the tensor of the root to all ranks."""
        shared, (tensor,), root = self._open, as_list(tensors), get_root(opts)
        require_dense([tensor])

        def run() -> None:
            flat = flatten_bytes(tensor)
            shared.movement.broadcast(flat, root)
            write_back(tensor, flat)

        return self._execute(run, [tensor], [tensor], opts)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = dist.ReduceOp.SUM, timeout: Any = None) -> Any:
        """Reduce the tensor over all ranks, into the root's. The other ranks keep their values."""
        shared, (tensor,), root = self._open, as_list(tensors), get_root(opts)
        operation = getattr(opts, "reduceOp", op)
        require_dense([tensor])
        view = view_as_reducible(tensor, operation)
        reduction = shared.reductions.get_reduction(operation, view.dtype)

        def run() -> None:
            flat = flatten(view)
            shared.reductions.reduce(flat, reduction, root)
            if self._member.rank == root:
                write_back(view, flat)

        return self._execute(run, [view], [tensor], opts)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> SharedMemoryWork:
        """Copy the tensor of each rank into the list of all ranks. Ranks may have tensors of different sizes."""
        (value,), outputs = as_list(input_tensors), as_only_list(output_tensors)
        return self._gather_into([(outputs, value)], opts)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> SharedMemoryWork:
        """Make several calls of `allgather`. `output_lists[i]` gets what the ranks pass as `input_list[i]`."""
        require_count(output_lists, len(input_list), "lists of outputs")
        return self._gather_into(list(zip(output_lists, input_list, strict=True)), opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SharedMemoryWork:
        """Copy the tensors of all ranks, all of one size, one after the other into the output."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedMemoryWork:
        """Make several calls of `all_gather_single`."""
        shared, size = self._open, self._member.size
        require_count(outputs, len(inputs), "outputs")
        require_dense([*outputs, *inputs])
        for output, value in zip(outputs, inputs, strict=True):
            require_one_dtype([output, value])
            require_values(output, size * value.numel(), "the output of an all_gather")

        def run() -> None:
            for output, value in zip(outputs, inputs, strict=True):
                flat, flat_value = flatten_bytes(output), flatten_bytes(value)
                if len(flat):
                    shared.movement.all_gather(flat_value, flat.split(len(flat_value)))
                write_back(output, flat)

        return self._execute(run, outputs, list(outputs), opts)

    def _gather_into(self, calls: Sequence[tuple[Sequence[Tensor], Tensor]], opts: Any) -> SharedMemoryWork:
        shared, written = self._open, [output for outputs, _ in calls for output in outputs]
        for outputs, value in calls:
            require_count(outputs, self._member.size, "outputs")
            require_dense([*outputs, value])
            require_one_dtype([*outputs, value])
            require_values(outputs[self._member.rank], value.numel(), "this rank's output of an all_gather")

        def run() -> None:
            for outputs, value in calls:
                flats = [flatten_bytes(output) for output in outputs]
                shared.movement.all_gather(flatten_bytes(value), flats)
                for output, flat in zip(outputs, flats, strict=True):
                    write_back(output, flat)

        return self._execute(run, written, [list(calls[0][0])] if len(calls) == 1 else written, opts)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> SharedMemoryWork:
        """Copy the tensor of each rank, all of one size, into the root's list."""
        shared, (value,), root = self._open, as_list(input_tensors), get_root(opts)
        outputs: list[Tensor] = as_only_list(output_tensors) if self._member.rank == root else []
        require_dense([*outputs, value])
        require_one_dtype([*outputs, value])
        if self._member.rank == root:
            require_count(outputs, self._member.size, "outputs")
            for output in outputs:
                require_values(output, value.numel(), "the outputs of a gather")

        def run() -> None:
            flats = [flatten_bytes(output) for output in outputs]
            shared.movement.gather(flatten_bytes(value), flats or None, root)
            for output, flat in zip(outputs, flats, strict=True):
                write_back(output, flat)

        return self._execute(run, outputs, [outputs], opts)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> SharedMemoryWork:
        """Copy the tensors of the root's list, all of one size, to the ranks."""
        shared, (output,), root = self._open, as_list(output_tensors), get_root(opts)
        inputs: list[Tensor] = as_only_list(input_tensors) if self._member.rank == root else []
        require_dense([*inputs, output])
        require_one_dtype([*inputs, output])
        if self._member.rank == root:
            require_count(inputs, self._member.size, "inputs")
            for value in inputs:
                require_values(value, output.numel(), "the inputs of a scatter")

        def run() -> None:
            flat, values = flatten_bytes(output), [flatten_bytes(value) for value in inputs]
            shared.movement.scatter(flat, values or None, root)
            write_back(output, flat)

        return self._execute(run, [output], [output], opts)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> SharedMemoryWork:
        """Reduce `inputs[r]` of all ranks into the output of rank r. The inputs may differ in size."""
        (output,), inputs = as_list(output_tensors), as_only_list(input_tensors)
        require_count(inputs, self._member.size, "inputs")
        require_values(output, inputs[self._member.rank].numel(), "the output of a reduce_scatter")
        return self._reduce_scatter([output], [inputs], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SharedMemoryWork:
        """Reduce the input over all ranks, and put the piece of this rank into the output."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedMemoryWork:
        """Make several calls of `reduce_scatter_single`."""
        require_count(outputs, len(inputs), "outputs")
        for output, value in zip(outputs, inputs, strict=True):
            require_values(value, self._member.size * output.numel(), "the input of a reduce_scatter")
        return self._reduce_scatter(outputs, [[value] for value in inputs], opts)

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> SharedMemoryWork:
        """Make calls of reduce_scatter. The inputs of each are a tensor for each rank, or one for all."""
        shared, operation, size = self._open, get_operation(opts), self._member.size
        require_dense([*outputs, *(value for values in inputs for value in values)])
        views = [view_as_reducible(output, operation) for output in outputs]
        calls = []
        for view, values in zip(views, inputs, strict=True):
            parts = [view_as_reducible(value, operation) for value in values]
            require_one_dtype([view, *parts])
            calls.append((view, parts, shared.reductions.get_reduction(operation, view.dtype)))

        def run() -> None:
            for view, parts, reduction in calls:
                flat, values = flatten(view), [flatten(part) for part in parts]
                if len(values) == 1 and size > 1:
                    values = list(values[0].split(max(1, len(flat)))) if len(flat) else [flat] * size
                shared.reductions.reduce_scatter(flat, values, reduction)
                write_back(view, flat)

        return self._execute(run, views, list(outputs), opts)

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> SharedMemoryWork:
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j. Sizes may differ."""
        shared, outputs, inputs = self._open, list(output_tensors), list(input_tensors)
        require_count(outputs, self._member.size, "outputs")
        require_count(inputs, self._member.size, "inputs")
        require_dense([*outputs, *inputs])
        require_one_dtype([*outputs, *inputs])
        require_values(outputs[self._member.rank], inputs[self._member.rank].numel(), "what a rank sends to itself")

        def run() -> None:
            flats = [flatten_bytes(output) for output in outputs]
            shared.movement.all_to_all(flats, [flatten_bytes(value) for value in inputs])
            for output, flat in zip(outputs, flats, strict=True):
                write_back(output, flat)

        return self._execute(run, outputs, outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> SharedMemoryWork:
        """Copy rows of the input to all ranks, and theirs to rows of the output.

        The sizes are the rows for and from each rank; without them all ranks get equally many.
        """
        shared, size = self._open, self._member.size
        require_dense([output, input])
        require_one_dtype([output, input])
        output_bytes = split_bytes(output, output_split_sizes, size)
        input_bytes = split_bytes(input, input_split_sizes, size)

        def run() -> None:
            flat = flatten_bytes(output)
            shared.movement.all_to_all(flat.split(output_bytes), flatten_bytes(input).split(input_bytes))
            write_back(output, flat)

        return self._execute(run, [output], [output], opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> SharedMemoryWork:
        """Wait for all ranks."""
        return self._execute(self._open.movement.barrier, [], [], opts)

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> SharedMemoryWork:
        """Begin to send a tensor to a rank of the group."""
        (tensor,) = tensors
        require_dense([tensor])
        require_other_rank(dstRank, self._member)
        return self._open.messages.send(flatten_bytes(tensor), dstRank, tag)

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> SharedMemoryWork:
        """Begin to receive a tensor from a rank of the group."""
        require_other_rank(srcRank, self._member)
        return self._receive(tensors, srcRank, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> SharedMemoryWork:
        """Begin to receive a tensor from the first rank that sends one with the tag."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Sequence[Tensor], source: int | None, tag: int) -> SharedMemoryWork:
        (tensor,) = tensors
        require_dense([tensor])
        flat = flatten_bytes(tensor)
        return self._open.messages.receive(flat, source, tag, lambda: write_back(tensor, flat))

    @property
    def group_name(self) -> Any:
        """The name of the group, equal on all ranks."""
        return self._name

    def getGroupName(self) -> str:
        """Return the name of the group to torch's C++ code."""
        return self._name

    @property
    def group_desc(self) -> str:
        """A description of the group."""
        return self._description

    def getBackendName(self) -> str:
        """Return the name of the backend to torch's C++ code."""
        return BACKEND_NAME

    def get_group_store(self) -> Any:
        """Return the store through which the ranks met."""
        return self._store

    def _set_group_name(self, name: Any) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a block of operations. They run one by one."""

    def _end_coalescing(self, device: torch.device) -> SharedMemoryWork:
        """Return a work that is done when all operations that were started before are done."""
        return self._open.queue.start(lambda: None, [])

    @property
    def _open(self) -> SharedGroup:
        if self._shared is None:
            raise make_error(encode_failure(FailureKind.CLOSED, self._member.rank), self._member)
        self._shared.signals.check()
        return self._shared

    def _execute(
        self, run: Callable[[], None], written: Sequence[Tensor], outputs: list[Any], opts: Any
    ) -> SharedMemoryWork:
        """Run an operation now, or queue it if the call is asynchronous."""
        queue = self._open.queue
        if any(tensor.is_inference() for tensor in written):
            operation = run

            def run_writable() -> None:
                with writable(written):
                    operation()

            run = run_writable
        if getattr(opts, "asyncOp", True):
            return queue.start(run, outputs)
        return queue.run(run, outputs)
