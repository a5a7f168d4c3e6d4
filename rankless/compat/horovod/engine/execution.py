"""Executes scheduled batches: each operation on this rank's tensors, on the backend that suits it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankless.compat.horovod.engine.backends.adasum import adasum
from rankless.compat.horovod.engine.backends.host_layout import HostLayout, compute_host_layout
from rankless.compat.horovod.engine.backends.process_group import ProcessGroupBackend, open_process_group
from rankless.compat.horovod.engine.backends.shared_memory import SharedMemoryBackend, open_slots
from rankless.compat.horovod.engine.backends.store_exchange import check_all_ranks
from rankless.compat.horovod.engine.fusion import Activity, FusionBuffer
from rankless.compat.horovod.engine.messages import Execute, OperationResponse, RequestMetadata
from rankless.compat.horovod.engine.requests import EngineRequest, OperationKind, ReduceOpCode
from rankless.compat.horovod.engine.scaling import DTYPES, ScaledReduction
from rankless.compat.horovod.exceptions import HorovodInternalError
from rankless.config.shared_memory_support import has_ordered_stores

EXECUTION_ERRORS = (AssertionError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class ExecutionContext:
    """The rank and its peers, as execution needs to know them."""

    rank: int
    hosts: Sequence[str]
    """The host of each rank. Ranks of one host share memory."""
    store: Any
    timeout: timedelta
    check: Callable[[], None]
    """Raises HorovodInternalError if a peer is gone."""
    activity: Activity
    reduces_by_hosts: bool
    """Whether ranks of several hosts reduce within their hosts first."""


class OperationExecutor:
    """Executes batches on one rank, and owns the backends."""

    def __init__(self, context: ExecutionContext) -> None:
        self._context = context
        self._groups: dict[tuple[int, str], ProcessGroupBackend] = {}
        self._shared_memory: dict[int, SharedMemoryBackend | None] = {}
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
            self._context.check()
            raise HorovodInternalError(f"{keys[0]}: {error}") from error

    def close(self, *, is_stuck: bool = False) -> None:
        """Release the backends. A thread that is stuck in a backend gets an error, and the peers may, too."""
        for group in self._groups.values() if is_stuck else ():
            group.close()
        self._groups.clear()
        self._shared_memory.clear()

    def forget(self, set_id: int) -> None:
        """Release the backends of a removed process set."""
        self._shared_memory.pop(set_id, None)
        for key in [key for key in self._groups if key[0] == set_id]:
            del self._groups[key]  # without abort: other ranks may still execute the set's last operation

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
        memory = self._get_shared_memory(set_id, members, keys) if inputs[0].device.type == "cpu" else None
        if first.reduction is ReduceOpCode.ADASUM:
            with self._context.activity(keys, "ADASUM_ALLREDUCE"):
                self._adasum(set_id, members, inputs, outputs, reduction)
        elif len(members) == 1:
            for tensor, output in zip(inputs, outputs, strict=True):
                reduction.finish(reduction.apply_prescale(output.detach().copy_(tensor.detach())))
        elif memory is not None:
            with self._context.activity(keys, memory.activity):
                memory.allreduce(inputs, outputs, reduction)
        else:
            self._allreduce_by_group(
                self._get_group(set_id, members, inputs[0].device), keys, inputs, outputs, reduction
            )
        return results

    def _allreduce_by_group(
        self,
        group: ProcessGroupBackend,
        keys: Sequence[str],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        reduction: ScaledReduction,
    ) -> None:
        name = "NCCL_ALLREDUCE" if inputs[0].device.type == "cuda" else "GLOO_ALLREDUCE"
        if len(inputs) == 1:
            buffer = outputs[0].detach()
            if outputs[0].data_ptr() != inputs[0].data_ptr():
                buffer.copy_(inputs[0].detach())
        else:
            buffer = self._fusion.pack(keys, inputs)
        reduction.apply_prescale(buffer)
        with self._context.activity(keys, name):
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
        group = self._get_group(set_id, members, inputs[0].device) if size > 1 else None
        for tensor, output in zip(inputs, outputs, strict=True):
            own = reduction.apply_prescale(tensor.detach().clone()).reshape(1, -1)
            rows = own if group is None else group.allgather(own, [1] * size)
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
        group = self._get_group(set_id, members, tensor.device)
        with self._context.activity([item.key], f"{'NCCL' if tensor.is_cuda else 'GLOO'}_{request.kind.name}"):
            if request.kind is OperationKind.ALLGATHER:
                return group.allgather(tensor, item.details)
            if request.kind is OperationKind.ALLTOALL:
                assert request.splits is not None
                return group.alltoall(tensor, request.splits, item.details), item.details
            assert request.output is not None
            output = request.output.detach()
            if self._context.rank == request.root and output.data_ptr() != tensor.data_ptr():
                output.copy_(tensor)
            group.broadcast(output, members.index(request.root))
            return request.output

    def _reducescatter(self, set_id: int, members: Sequence[int], key: str, request: EngineRequest) -> torch.Tensor:
        """Reduce the whole tensor, and return this rank's rows. The first ranks get one row more if it is uneven."""
        assert request.tensor is not None
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

    def _get_group(self, set_id: int, members: Sequence[int], device: torch.device) -> ProcessGroupBackend:
        if (set_id, device.type) not in self._groups:
            context = self._context
            store = dist.PrefixStore(f"set/{set_id}/{device.type}", context.store)  # type: ignore[attr-defined]
            self._groups[set_id, device.type] = open_process_group(
                store, index=members.index(context.rank), size=len(members), device=device, timeout=context.timeout
            )
        return self._groups[set_id, device.type]

    def _get_shared_memory(
        self, set_id: int, members: Sequence[int], keys: Sequence[str]
    ) -> SharedMemoryBackend | None:
        """Return the shared memory backend if all ranks of the process set can use one, else None on all of them."""
        if set_id not in self._shared_memory:
            layout = compute_host_layout(members, self._context.hosts, self._context.rank)
            store = dist.PrefixStore(f"set/{set_id}/memory", self._context.store)  # type: ignore[attr-defined]
            self._shared_memory[set_id] = None
            if layout is not None:
                with self._context.activity(keys, "INIT_FUSION_BUFFER"):
                    self._shared_memory[set_id] = self._open_shared_memory(set_id, layout, store)
        return self._shared_memory[set_id]

    def _open_shared_memory(self, set_id: int, layout: HostLayout, store: Any) -> SharedMemoryBackend | None:
        context, slots, cross_host = self._context, None, None
        check, seconds = context.check, context.timeout.total_seconds()
        if has_ordered_stores():
            host_store = dist.PrefixStore(f"host/{layout.host_index}", store)  # type: ignore[attr-defined]
            slots = open_slots(
                host_store, ranks=layout.ranks, index=layout.local_index, check=check, timeout_seconds=seconds
            )
        if layout.host_count > 1:
            has_slots = slots is not None and context.reduces_by_hosts
            size = layout.host_count * len(layout.ranks)
            if not check_all_ranks(store, has_slots, size=size, check=check, timeout_seconds=seconds):
                return None
            cross_store = dist.PrefixStore(f"across/{layout.local_index}", store)  # type: ignore[attr-defined]
            cross_host = open_process_group(
                cross_store,
                index=layout.host_index,
                size=layout.host_count,
                device=torch.device("cpu"),
                timeout=context.timeout,
            )
            self._groups[set_id, "across"] = cross_host
        if slots is None:
            return None
        return SharedMemoryBackend(slots, check=check, timeout_seconds=seconds, cross_host=cross_host)


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
