"""Executes scheduled batches: each operation on this rank's tensors, on the backend that suits it."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankless.errors import CollectiveError
from rankless.extensions.horovod.engine.backends import (
    DTYPES,
    Backend,
    BackendRequest,
    ProcessGroupBackend,
    ScaledReduction,
    SharedMemoryBackend,
    open_backend,
)
from rankless.extensions.horovod.engine.messages import Execute, OperationResponse, RequestMetadata
from rankless.extensions.horovod.engine.requests import EngineRequest, OperationKind, ReduceOpCode
from rankless.extensions.horovod.exceptions import HorovodInternalError
from rankless.runtime.rendezvous.find_rendezvous import print_notice

EXECUTION_ERRORS = (AssertionError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
CAUSE_SECONDS = 0.5
"""How long a rank whose operation failed waits for rank 0, which knows why if a rank has ended."""
POLL_SECONDS = 0.01
SEE_LOGS = "see the logs of the ranks that have left or ended"


Activity = Callable[[Sequence[str], str], AbstractContextManager[None]]
"""Records an activity in the timeline, from the keys of the operations and the activity's name."""


class FusionBuffer:
    """On the CPU, one buffer that grows and is reused by every batch. On a GPU, torch's allocator reuses memory."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def pack(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensors' values in one flat tensor, valid until the next call.

        The tensors have the same dtype and device.
        """
        buffer = self._get_buffer(keys, sum(tensor.numel() for tensor in tensors), tensors[0])
        with self._activity(keys, "MEMCPY_IN_FUSION_BUFFER"):
            torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=buffer)
        return buffer

    def unpack(self, keys: Sequence[str], buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the values of the flat tensor into the tensors."""
        with self._activity(keys, "MEMCPY_OUT_FUSION_BUFFER"):
            pieces = buffer.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_([tensor.detach().reshape(-1) for tensor in tensors], list(pieces))

    def _get_buffer(self, keys: Sequence[str], count: int, like: torch.Tensor) -> torch.Tensor:
        size = count * like.element_size()
        if like.device.type != "cpu":
            with self._activity(keys, "INIT_FUSION_BUFFER"):
                return torch.empty(count, dtype=like.dtype, device=like.device)
        if size > len(self._memory):
            with self._activity(keys, "INIT_FUSION_BUFFER"):
                self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._memory[:size].view(like.dtype)


@dataclass(frozen=True, kw_only=True)
class ExecutionContext:
    """The rank and its peers, as execution needs to know them."""

    rank: int
    hosts: Sequence[str]
    """The host of each rank. Ranks of one host share memory."""
    store: Any
    timeout: timedelta
    check: Callable[[], None]
    """Called while an operation waits. Raises HorovodInternalError if a peer is gone."""
    find_cause: Callable[[str], HorovodInternalError | None]
    """Called with a failure. Returns why nothing more is executed, if rank 0 or this rank has ended everything."""
    activity: Activity
    reduces_by_hosts: bool
    """Whether ranks of several hosts reduce within their hosts first."""


class OperationExecutor:
    """Executes batches on one rank, and owns the backends."""

    def __init__(self, context: ExecutionContext) -> None:
        self._context = context
        self._backends: dict[tuple[int, str], Backend] = {}
        self._fusion = FusionBuffer(context.activity)

    def run(self, execute: Execute, members: Sequence[int], requests: Mapping[str, EngineRequest]) -> dict[str, Any]:
        """Execute a batch and return the results by key. Raises HorovodInternalError if it fails."""
        keys = [item.key for item in execute.items]
        pairs = [(item, requests.get(item.key) or self._make_zero_request(item)) for item in execute.items]
        kind = pairs[0][1].kind
        try:
            if kind is OperationKind.ALLREDUCE:
                parts = _split_by_dtype(keys, [one for _, one in pairs])
                return {
                    key: one for part in parts for key, one in self._allreduce(execute.set_id, members, part).items()
                }
            return {item.key: self._run_single(execute.set_id, members, item, one) for item, one in pairs}
        except HorovodInternalError:
            raise
        except EXECUTION_ERRORS as error:  # the waiting thread, which may be another one, raises every error
            failure = f"{keys[0]}: {error}"
            cause = self._find_cause(failure, wait_seconds=CAUSE_SECONDS if isinstance(error, CollectiveError) else 0.0)
            raise HorovodInternalError(*(cause.args if cause is not None else [failure])) from error

    def close(self, *, is_stuck: bool = False) -> None:
        """Release the backends. A thread that is stuck in a backend gets an error, and the peers may, too."""
        for backend in self._backends.values():
            backend.close(is_stuck=is_stuck)
        self._backends.clear()

    def forget(self, set_id: int) -> None:
        """Release the backends of a removed process set. Other ranks may still execute the set's last operation."""
        for key in [key for key in self._backends if key[0] == set_id]:
            self._backends.pop(key).close()

    def _find_cause(self, failure: str, *, wait_seconds: float) -> HorovodInternalError | None:
        """Return the reason for which nothing more is executed, if there is one within this time."""
        deadline = time.monotonic() + wait_seconds
        while (cause := self._context.find_cause(failure)) is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return cause

    def _make_zero_request(self, item: OperationResponse) -> EngineRequest:
        """Return the request with which a rank that has joined takes part."""
        request = item.request
        assert isinstance(request, RequestMetadata)
        device = "cuda" if request.device == "cuda" else "cpu"
        zeros = torch.zeros(request.shape, dtype=DTYPES[request.dtype], device=device)
        return EngineRequest(
            kind=OperationKind(request.kind),
            tensor=zeros,
            output=zeros,
            reduction=ReduceOpCode(request.reduction),
            prescale=request.prescale,
            postscale=request.postscale,
        )

    def _allreduce(self, set_id: int, members: Sequence[int], requests: Mapping[str, EngineRequest]) -> dict[str, Any]:
        keys, first = list(requests), next(iter(requests.values()))
        results = {key: one.output for key, one in requests.items()}
        pairs = [(one.tensor, one.output) for one in requests.values()]
        inputs = [tensor for tensor, _ in pairs if tensor is not None and tensor.numel()]
        outputs = [output for _, output in pairs if output is not None and output.numel()]
        if not inputs:
            return results
        reduction = ScaledReduction(first.reduction, first.prescale, first.postscale, len(members))
        if first.reduction is ReduceOpCode.ADASUM:
            with self._context.activity(keys, "ADASUM_ALLREDUCE"):
                self._adasum(set_id, members, inputs, outputs, reduction)
            return results
        if len(members) == 1:
            for tensor, output in zip(inputs, outputs, strict=True):
                reduction.finish(reduction.apply_prescale(output.detach().copy_(tensor.detach())))
            return results
        backend = self._get_backend(set_id, members, inputs[0].device, keys)
        if isinstance(backend, SharedMemoryBackend):
            with self._context.activity(keys, f"{backend.name}_ALLREDUCE"):
                backend.allreduce(inputs, outputs, reduction)
        else:
            self._allreduce_by_group(backend, keys, inputs, outputs, reduction)
        return results

    def _allreduce_by_group(
        self,
        group: ProcessGroupBackend,
        keys: Sequence[str],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        reduction: ScaledReduction,
    ) -> None:
        if len(inputs) == 1:
            buffer = outputs[0].detach()
            if outputs[0].data_ptr() != inputs[0].data_ptr():
                buffer.copy_(inputs[0].detach())
        else:
            buffer = self._fusion.pack(keys, inputs)
        reduction.apply_prescale(buffer)
        with self._context.activity(keys, f"{group.name}_ALLREDUCE"):
            group.allreduce(buffer, reduction.reduction)
        reduction.finish(buffer)
        if len(inputs) > 1:
            self._fusion.unpack(keys, buffer, outputs)

    def _adasum(
        self,
        set_id: int,
        members: Sequence[int],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        reduction: ScaledReduction,
    ) -> None:
        size = len(members)
        if size & (size - 1):
            raise HorovodInternalError(f"Running Adasum with non-power of 2 ranks is not supported yet: {size} ranks.")
        backend = self._get_backend(set_id, members, inputs[0].device, ()) if size > 1 else None
        for tensor, output in zip(inputs, outputs, strict=True):
            own = reduction.apply_prescale(tensor.detach().clone()).reshape(1, -1)
            rows = own if backend is None else backend.allgather(own, [1] * size)
            output.detach().copy_(reduction.finish(adasum(list(rows))).reshape(output.shape))

    def _run_single(self, set_id: int, members: Sequence[int], item: OperationResponse, request: EngineRequest) -> Any:
        """Execute an operation that cannot be fused, and return its result."""
        tensor = request.tensor
        assert tensor is not None
        tensor = tensor.detach()
        if request.kind is OperationKind.REDUCESCATTER:
            return self._reducescatter(set_id, members, item.key, request)
        if len(members) == 1:
            return _run_on_single_rank(request, tensor)
        backend = self._get_backend(set_id, members, tensor.device, [item.key])
        with self._context.activity([item.key], f"{backend.name}_{request.kind.name}"):
            if request.kind is OperationKind.ALLGATHER:
                return backend.allgather(tensor, item.details)
            if request.kind is OperationKind.ALLTOALL:
                assert request.splits is not None
                return backend.alltoall(tensor, request.splits, item.details), item.details
            assert request.output is not None
            output = request.output.detach()
            if self._context.rank == request.root and output.data_ptr() != tensor.data_ptr():
                output.copy_(tensor)
            backend.broadcast(output, members.index(request.root))
            return request.output

    def _reducescatter(self, set_id: int, members: Sequence[int], key: str, request: EngineRequest) -> torch.Tensor:
        """Reduce the whole tensor, and return this rank's rows. The first ranks get one row more if it is uneven."""
        assert request.tensor is not None
        if len(members) > 1:
            backend = self._get_backend(set_id, members, request.tensor.device, [key])
            if isinstance(backend, SharedMemoryBackend):
                reduction = ScaledReduction(request.reduction, request.prescale, request.postscale, len(members))
                with self._context.activity([key], f"{backend.name}_REDUCESCATTER"):
                    return backend.reducescatter(request.tensor.detach(), reduction)
        index = members.index(self._context.rank)
        total = torch.empty_like(request.tensor.detach())
        allreduce = EngineRequest(
            kind=OperationKind.ALLREDUCE,
            tensor=request.tensor,
            output=total,
            reduction=request.reduction,
            prescale=request.prescale,
            postscale=request.postscale,
        )
        self._allreduce(set_id, members, {key: allreduce})
        rows, remainder = divmod(total.shape[0], len(members))
        start = index * rows + min(index, remainder)
        return total[start : start + rows + (index < remainder)].clone()

    def _get_backend(self, set_id: int, members: Sequence[int], device: torch.device, keys: Sequence[str]) -> Backend:
        """Return the backend of a process set for a kind of device. All ranks of the set open it together."""
        found = self._backends.get((set_id, device.type))
        if found is not None:
            return found
        context, name = self._context, f"set/{set_id}/{device.type}"
        request = BackendRequest(
            name=f"horovod {name}",
            store=dist.PrefixStore(name, context.store),  # type: ignore[attr-defined]  # not in the stubs
            rank=context.rank,
            members=members,
            hosts=[context.hosts[member] for member in members],
            timeout=context.timeout,
            watch=self._watch,
            reduces_by_hosts=context.reduces_by_hosts,
        )
        with context.activity(keys, "INIT_FUSION_BUFFER") if request.can_share_memory(device) else nullcontext():
            backend = self._backends[set_id, device.type] = open_backend(request, device, notify=print_notice)
        return backend

    def _watch(self) -> None:
        """Raise an error that the backends expect, if a peer is gone."""
        try:
            self._context.check()
        except HorovodInternalError as error:
            raise CollectiveError(
                expected="all ranks to stay until the operation has ended", found=str(error), fix=SEE_LOGS
            ) from error


def _split_by_dtype(keys: Sequence[str], requests: Sequence[EngineRequest]) -> list[dict[str, EngineRequest]]:
    """Divide a batch into parts that fit into one buffer each: a group may have tensors of several dtypes."""
    parts: dict[Any, dict[str, EngineRequest]] = {}
    for key, request in zip(keys, requests, strict=True):
        kind = None if request.tensor is None else (request.tensor.dtype, request.tensor.device.type)
        parts.setdefault(kind, {})[key] = request
    return list(parts.values())


def _run_on_single_rank(request: EngineRequest, tensor: torch.Tensor) -> Any:
    if request.kind is OperationKind.ALLGATHER:
        return tensor.clone() if tensor.dim() else tensor.reshape(1).clone()
    if request.kind is OperationKind.ALLTOALL:
        return tensor.clone(), (len(tensor),)
    assert request.output is not None
    request.output.detach().copy_(tensor)
    return request.output


def adasum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the adaptive sum of one tensor's values on all ranks, with products in float64.

    Parallel gradients are averaged, orthogonal gradients are added. Ranks are combined in pairs, then pairs of pairs.
    Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2020).

    Args:
        tensors: The values of each rank. Their number is a power of 2.
    """
    if len(tensors) == 1:
        return tensors[0]
    middle = len(tensors) // 2
    one, other = adasum(tensors[:middle]), adasum(tensors[middle:])
    left, right = one.double().reshape(-1), other.double().reshape(-1)
    product, left_square, right_square = left @ right, left @ left, right @ right
    left_factor = 1 - product / (2 * left_square) if left_square else torch.ones_like(product)
    right_factor = 1 - product / (2 * right_square) if right_square else torch.ones_like(product)
    return (left_factor * left + right_factor * right).reshape(one.shape).to(one.dtype)
