"""A `torch.distributed` process group whose collectives run in memory that the processes of one host share.

`torch.distributed`'s functions, DistributedDataParallel and FSDP2 call the methods below, under torch's names. Each
checks its arguments, and then runs as an operation of the group's queue: in order with all others.
"""

import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import _unregister_process_group

from rankless.collectives.backends.argument_conversion import (
    FusedTensors,
    PreparedCall,
    as_list,
    as_only_list,
    flatten_bytes,
    get_operation,
    get_root,
    get_timeout_seconds,
    prepare_all_gather,
    prepare_all_gather_single,
    prepare_all_reduce,
    prepare_all_to_all,
    prepare_all_to_all_single,
    prepare_barrier,
    prepare_broadcast,
    prepare_fused_all_reduce,
    prepare_gather,
    prepare_reduce,
    prepare_reduce_scatter,
    prepare_scatter,
    prepare_sparse_all_reduce,
    require_count,
    require_dense,
    require_other_rank,
    writable,
    write_back,
)
from rankless.collectives.backends.gloo_group import make_gloo_group
from rankless.collectives.backends.group_failure_errors import Membership, make_error
from rankless.collectives.backends.operation_queue import SharedMemoryWork
from rankless.collectives.backends.shared_group import SharedGroup, open_shared_group
from rankless.collectives.backends.store_exchange import do_nothing
from rankless.config.shared_memory_support import Support
from rankless.errors import CollectiveError
from rankless.records.group_failure_codes import FailureKind, encode_failure

BACKEND_NAME = "shared_memory"
_ProcessGroup: Any = dist.ProcessGroup
"""torch's stubs give several signatures to most methods. torch itself calls only those below."""


class _Synchronous:
    """Options of a call that returns when it is done."""

    asyncOp = False


class SharedMemoryProcessGroup(_ProcessGroup):  # type: ignore[misc]  # its base is Any, see above
    """A process group of ranks of one host. `make_shared_memory_group` makes it.

    It takes dense tensors on the CPU of every dtype, shape and stride, empty ones too, and sums sparse ones. A
    collective combines values in the order of ranks, so all ranks get the same bits. If a rank ends, aborts, is late
    or makes another call, all ranks raise `CollectiveError`, and the group cannot be used any more.

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

    def allocate(
        self,
        count: int,
        dtype: torch.dtype,
        *,
        limit_bytes: int | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> Tensor | None:
        """Return a flat tensor in the group's memory, filled with zeros.

        `all_reduce` of exactly this tensor copies nothing into shared memory. All ranks call this in the same order,
        with the same arguments. The memory is free when the tensor and all its views are gone.

        Args:
            count: The number of values.
            dtype: Their dtype.
            limit_bytes: The most bytes that all such tensors may take of each rank's memory. Default: any number.
            on_close: A method that is called when the group is closed. The group does not keep its object alive.

        Returns:
            The tensor. None on all ranks if there is no memory, or on any rank not so much within the limit.

        Raises:
            CollectiveError: The group cannot be used, or a rank does not call this within the group's timeout.
        """
        return self._open.allocate(count, dtype, limit_bytes=limit_bytes, on_close=on_close)

    def map_common(self, byte_count: int, terms: str) -> Tensor | None:
        """Return a tensor of bytes, filled with zeros, that is the same memory on all ranks.

        Nothing orders what the ranks read and write. All ranks call this in the same order. The memory is free when the
        tensors over it are gone on all ranks; it may outlive the group.

        Args:
            byte_count: The number of bytes.
            terms: What the ranks must agree on, as text: what the memory is for.

        Returns:
            The tensor. None on all ranks if there is no memory, or if they do not pass the same arguments.

        Raises:
            CollectiveError: The group cannot be used, or a rank does not call this within the group's timeout.
        """
        return self._open.map_common(byte_count, terms)

    @property
    def timeout(self) -> timedelta:
        """How long the ranks wait for each other, unless a call says otherwise."""
        return timedelta(seconds=self._member.timeout_seconds)

    def abort(self) -> None:
        """End the group on all ranks. All waits raise `CollectiveError` at once."""
        if self._shared is not None:
            self._shared.abort()

    def interrupt(self) -> None:
        """End the group on all ranks, because this one has raised an exception where others wait. `reopen` follows."""
        if self._shared is not None:
            self._shared.interrupt()

    def reopen(self, number: int, *, check: Callable[[], None] = do_nothing) -> None:
        """Give the group new memory. All ranks call this, when none of them is in an operation of the group any more.

        What the group has allocated before is of no more use. Operations that are not done fail.

        Args:
            number: Equal on all ranks, and another one at each call.
            check: Called while waiting for the others. It raises if the wait is in vain.

        Raises:
            CollectiveError: A rank does not call this within the group's timeout, has ended, or has no memory.
        """
        self.shutdown()
        store: Any = dist.PrefixStore(f"opened again {number}", self._store)  # type: ignore[attr-defined]  # no stub
        opened = self._open_again(store, check)
        if isinstance(opened, Support):
            raise CollectiveError(
                expected="the group of ranks to open again after an exception",
                found=opened.reason,
                fix="see how much shared memory the host has",
            )
        self._shared = opened

    def _open_again(self, store: Any, check: Callable[[], None]) -> Any:
        return open_shared_group(store, self._member, self.timeout, check=check)

    @property
    def end_error(self) -> CollectiveError | None:
        """Why no operation can run any more; None while operations can."""
        try:
            self._open  # noqa: B018  # raises if it has ended
        except CollectiveError as error:
            return error
        return None

    @property
    def operation_count(self) -> int:
        """How many collectives this rank has started. Ranks that have made the same calls have the same number."""
        return 0 if self._shared is None else self._shared.queue.count

    def shutdown(self) -> None:
        """Leave the group, and release its memory, descriptors and threads. A second call does nothing."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def allreduce(self, tensors: Any, opts: Any = dist.ReduceOp.SUM, timeout: Any = None) -> SharedMemoryWork:
        """Reduce the tensor over all ranks, in place."""
        (tensor,) = as_list(tensors)
        if tensor.layout is torch.sparse_coo:
            names = self._member.global_ranks
            call = prepare_sparse_all_reduce(self._open.movement, tensor, get_operation(opts), names)
            return self._execute(call, opts, timeout)
        return self.allreduce_coalesced([tensor], opts, timeout)

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: Any = dist.ReduceOp.SUM, timeout: Any = None
    ) -> SharedMemoryWork:
        """Reduce several tensors of one dtype over all ranks, each in place."""
        return self._execute(prepare_all_reduce(self._open.reductions, tensors, get_operation(opts)), opts, timeout)

    def all_reduce_fused(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        operation: Any,
        *,
        before: Callable[[Tensor], object],
        after: Callable[[Tensor], object],
    ) -> None:
        """Reduce tensors of one dtype over all ranks into others, as if they were one. Not a method of torch's groups.

        Args:
            inputs: This rank's values.
            outputs: Tensors of the same lengths. One may be its input; otherwise the inputs keep their values.
            operation: A `torch.distributed.ReduceOp`.
            before: Called with flat copies of this rank's values, which it may change in place.
            after: Called with reduced values, which it may change in place: all of a rank's, or some.

        Raises:
            CollectiveError: As the other collectives.
        """
        shared = self._open
        call = prepare_fused_all_reduce(
            shared.reductions,
            shared.fused_reductions,
            FusedTensors(inputs, outputs),
            operation,
            before=before,
            after=after,
        )
        self._execute(call, _Synchronous())

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> SharedMemoryWork:
        """Copy the tensor of the root to all ranks."""
        (tensor,) = as_list(tensors)
        return self._execute(prepare_broadcast(self._open.movement, tensor, get_root(opts)), opts, timeout)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = dist.ReduceOp.SUM, timeout: Any = None) -> Any:
        """Reduce the tensor over all ranks, into the root's. The other ranks keep their values."""
        (tensor,), operation = as_list(tensors), getattr(opts, "reduceOp", op)
        return self._execute(prepare_reduce(self._open.reductions, tensor, operation, get_root(opts)), opts, timeout)

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> SharedMemoryWork:
        """Copy the tensor of each rank into the list of all ranks. Ranks may have tensors of different sizes."""
        (value,), outputs = as_list(input_tensors), as_only_list(output_tensors)
        return self._execute(prepare_all_gather(self._open.movement, [(outputs, value)]), opts, timeout)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> SharedMemoryWork:
        """Make several calls of `allgather`. `output_lists[i]` gets what the ranks pass as `input_list[i]`."""
        require_count(output_lists, len(input_list), "lists of outputs")
        calls = list(zip(output_lists, input_list, strict=True))
        return self._execute(prepare_all_gather(self._open.movement, calls), opts)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: Any = None
    ) -> SharedMemoryWork:
        """Copy the tensors of all ranks, all of one size, one after the other into the output."""
        return self._execute(prepare_all_gather_single(self._open.movement, [output], [input]), opts, timeout)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedMemoryWork:
        """Make several calls of `all_gather_single`."""
        return self._execute(prepare_all_gather_single(self._open.movement, outputs, inputs), opts)

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> SharedMemoryWork:
        """Copy the tensor of each rank, all of one size, into the root's list."""
        (value,), root = as_list(input_tensors), get_root(opts)
        outputs: list[Tensor] = as_only_list(output_tensors) if self._member.rank == root else []
        return self._execute(prepare_gather(self._open.movement, outputs, value, root), opts, timeout)

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> SharedMemoryWork:
        """Copy the tensors of the root's list, all of one size, to the ranks."""
        (output,), root = as_list(output_tensors), get_root(opts)
        inputs: list[Tensor] = as_only_list(input_tensors) if self._member.rank == root else []
        return self._execute(prepare_scatter(self._open.movement, output, inputs, root), opts, timeout)

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> SharedMemoryWork:
        """Reduce `inputs[r]` of all ranks into the output of rank r. The inputs may differ in size."""
        outputs, inputs = as_list(output_tensors), as_only_list(input_tensors)
        require_count(inputs, self._member.size, "inputs")
        call = prepare_reduce_scatter(self._open.reductions, outputs, [inputs], get_operation(opts))
        return self._execute(call, opts, timeout)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: Any = None
    ) -> SharedMemoryWork:
        """Reduce the input over all ranks, and put the piece of this rank into the output."""
        call = prepare_reduce_scatter(self._open.reductions, [output], [[input]], get_operation(opts))
        return self._execute(call, opts, timeout)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedMemoryWork:
        """Make several calls of `reduce_scatter_single`."""
        require_count(outputs, len(inputs), "outputs")
        single = [[value] for value in inputs]
        return self._execute(prepare_reduce_scatter(self._open.reductions, outputs, single, get_operation(opts)), opts)

    def alltoall(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> SharedMemoryWork:
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j. Sizes may differ."""
        call = prepare_all_to_all(self._open.movement, list(output_tensors), list(input_tensors))
        return self._execute(call, opts, timeout)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: Any = None,
    ) -> SharedMemoryWork:
        """Copy rows of the input to all ranks, and theirs to rows of the output.

        The sizes are the rows for and from each rank; without them all ranks get equally many.
        """
        call = prepare_all_to_all_single(self._open.movement, output, input, output_split_sizes, input_split_sizes)
        return self._execute(call, opts, timeout)

    def barrier(self, opts: Any = None, timeout: Any = None) -> SharedMemoryWork:
        """Wait for all ranks."""
        return self._execute(prepare_barrier(self._open.movement), opts, timeout)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. The error names a rank that does not call this within the timeout."""
        self._execute(prepare_barrier(self._open.movement), None, timeout).wait()

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

    @property
    def _device_types(self) -> list[torch.device]:
        # None while torch makes the group: to one with devices PyTorch 2.15 attaches a recorder in C++, which asks for
        # a backend that a group in Python does not have.
        return [torch.device("cpu")] if self in dist.distributed_c10d._world.pg_map else []

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

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

    def _execute(self, call: PreparedCall, opts: Any, timeout: Any = None) -> SharedMemoryWork:
        """Run a call now, or queue it if it is asynchronous."""
        shared, run = self._open, call.run
        seconds = get_timeout_seconds(opts, timeout)
        if seconds is not None or any(tensor.is_inference() for tensor in call.written):
            limit = nullcontext() if seconds is None else shared.signals.limit_waits(seconds)

            def run_limited() -> None:
                with limit, writable(call.written):
                    call.run()

            run = run_limited
        if getattr(opts, "asyncOp", True):
            return shared.queue.start(run, call.outputs)
        return shared.queue.run(run, call.outputs)


def register_backend() -> None:
    """Let `init_process_group`, `new_group` and device meshes make groups of the backend "shared_memory".

    A group that then cannot have shared memory, for example because its ranks are on several hosts, is one of Gloo. If
    the default group is in shared memory, new groups are too unless they name another backend.

    Example:
        >>> register_backend()
        >>> torch.distributed.is_backend_available("shared_memory")
        True
    """
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, _make_registered_group, extended_api=True, devices=["cpu"])


def _make_registered_group(options: Any, shared: SharedGroup | None) -> Any:
    """Return the group that torch then registers. `shared` is its memory if it has been opened before."""
    member = read_membership(options)
    opened = shared if isinstance(shared, SharedGroup) else open_shared_group(options.store, member, options.timeout)
    if isinstance(opened, SharedGroup):
        return SharedMemoryProcessGroup(options.store, member, opened, options.group_id)
    return make_gloo_instead(options)


def read_membership(options: Any) -> Membership:
    """Return this process's place in a group that torch asks a registered backend for."""
    return Membership(
        rank=options.group_rank,
        # The default group has no list of ranks.
        global_ranks=tuple(options.global_ranks_in_group) or tuple(range(options.group_size)),
        timeout_seconds=options.timeout.total_seconds(),
    )


def make_gloo_instead(options: Any) -> Any:
    """Return a Gloo group in place of one that a registered backend cannot make."""
    return make_gloo_group(options.store, options.group_rank, options.group_size, options.timeout)


def make_shared_memory_group(
    store: Any, rank: int, size: int, global_ranks: Sequence[int], timeout: timedelta
) -> SharedMemoryProcessGroup | None:
    """Make a process group of ranks of one host, whose collectives run in shared memory.

    All ranks of the group call this. `close_shared_memory_group` or `dist.destroy_process_group` closes it.

    Args:
        store: A `torch.distributed.Store` of the group's ranks, with keys that no earlier group has used.
        rank: This process's rank in the group.
        size: The number of ranks in the group.
        global_ranks: The ranks of the group as ranks of the job, in order.
        timeout: How long the ranks wait for each other, while the group is made and in its collectives.

    Returns:
        The group. None on all ranks if they are not on one host, `is_supported()` is false, or there is no memory.

    Raises:
        CollectiveError: A rank does not call this within the timeout, or its process has ended.

    Example:
        >>> store = torch.distributed.HashStore()
        >>> group = make_shared_memory_group(store, 0, 1, [0], timedelta(seconds=30))
        >>> torch.distributed.all_reduce(torch.ones(2), group=group)
        >>> close_shared_memory_group(group)
    """
    member = Membership(rank=rank, global_ranks=tuple(global_ranks[:size]), timeout_seconds=timeout.total_seconds())
    if rank == 0:
        store.set("group name", f"{BACKEND_NAME} {uuid.uuid4().hex}")
    shared = open_shared_group(store, member, timeout)
    if not isinstance(shared, SharedGroup):
        return None
    name = bytes(store.get("group name")).decode()
    group = SharedMemoryProcessGroup(store, member, shared, name)
    c10d._register_pg_in_world(
        group,
        backend_name=BACKEND_NAME,
        store=store,
        group_name=c10d.GroupName(name),
        backend_config=f"cpu:{BACKEND_NAME}",
        rank_mapping={global_rank: index for index, global_rank in enumerate(member.global_ranks)},
    )
    return group


def close_shared_memory_group(group: SharedMemoryProcessGroup) -> None:
    """Leave a group, release its memory, and unregister it from `torch.distributed`. A second call does nothing.

    Operations that are not done fail. Close a group after the last collective of all ranks.

    Args:
        group: A group of `make_shared_memory_group`.
    """
    group.shutdown()
    world = c10d._world
    name = world.pg_names.pop(group, None)
    for registry in (world.pg_map, world.pg_group_ranks, world.pg_backend_config, world.pg_coalesce_state):
        registry.pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    if tag is not None and group in world.tags_to_pg.get(tag, ()):
        world.tags_to_pg[tag].remove(group)
        if not world.tags_to_pg[tag]:
            del world.tags_to_pg[tag]
    if name is not None:
        _unregister_process_group(name)
