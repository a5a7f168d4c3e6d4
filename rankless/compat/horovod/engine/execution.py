"""Executing what has been decided: each operation of a batch on this rank's tensors, on the plane that suits it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankless.compat.horovod.common.exceptions import HorovodInternalError
from rankless.compat.horovod.engine.backends.adasum import adasum
from rankless.compat.horovod.engine.backends.host_layout import Layout, layout_of
from rankless.compat.horovod.engine.backends.process_group import GroupPlane, open_group
from rankless.compat.horovod.engine.backends.shared_memory import SharedMemoryPlane, is_ordered_here, open_slots
from rankless.compat.horovod.engine.backends.store_exchange import all_have
from rankless.compat.horovod.engine.fusion import Activity, FusionBuffer
from rankless.compat.horovod.engine.messages import Execute, Item, Request
from rankless.compat.horovod.engine.requests import Kind, Reduction, Submission
from rankless.compat.horovod.engine.scaling import DTYPES, Reducing

FAILURES = (AssertionError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class DriverContext:
    """What execution needs to know of this rank and its peers."""

    rank: int
    hosts: Sequence[str]
    """On which host each rank is: ranks of one host share memory."""
    store: Any
    timeout: timedelta
    check: Callable[[], None]
    """Raises HorovodInternalError if a peer is gone."""
    activity: Activity
    reduces_by_hosts: bool
    """Whether ranks of several hosts reduce within their hosts first."""


class Execution:
    """One rank's part in what is executed."""

    def __init__(self, surroundings: DriverContext) -> None:
        self._around = surroundings
        self._groups: dict[tuple[int, str], GroupPlane] = {}
        self._memories: dict[int, SharedMemoryPlane | None] = {}
        self._fusion = FusionBuffer(surroundings.activity)

    def run(self, execute: Execute, members: Sequence[int], submissions: Mapping[str, Submission]) -> dict[str, Any]:
        """The results of a batch by key. Raises HorovodInternalError if it fails."""
        keys = [item.key for item in execute.items]
        pairs = [(item, submissions.get(item.key) or self._zeros(item)) for item in execute.items]
        kind = pairs[0][1].kind
        try:
            if kind is Kind.ALLREDUCE:
                parts = _alike(keys, [one for _, one in pairs])
                return {
                    key: one for part in parts for key, one in self._allreduce(execute.set_id, members, part).items()
                }
            return {item.key: self._one(execute.set_id, members, item, one) for item, one in pairs}
        except HorovodInternalError:
            raise
        except FAILURES as error:  # whatever it is: who waits for the result is to have it, in whichever thread
            self._around.check()
            raise HorovodInternalError(f"{keys[0]}: {error}") from error

    def close(self, *, is_stuck: bool = False) -> None:
        """Let go of what was opened. If a thread is stuck in it, that thread gets an error, and perhaps others do."""
        for group in self._groups.values() if is_stuck else ():
            group.close()
        self._groups.clear()
        self._memories.clear()

    def forget(self, set_id: int) -> None:
        """A process set is no more."""
        self._memories.pop(set_id, None)
        for place in [place for place in self._groups if place[0] == set_id]:
            del self._groups[place]  # others may still be at its last operation

    def _zeros(self, item: Item) -> Submission:
        """What a rank that has joined takes part with."""
        request = item.request
        assert isinstance(request, Request)
        device = "cuda" if request.device == "cuda" else "cpu"
        zeros = torch.zeros(request.shape, dtype=DTYPES[request.dtype], device=device)
        return Submission(
            kind=Kind(request.kind),
            tensor=zeros,
            output=zeros,
            reduction=Reduction(request.reduction),
            prescale=request.prescale,
            postscale=request.postscale,
        )

    def _allreduce(self, set_id: int, members: Sequence[int], batch: Mapping[str, Submission]) -> dict[str, Any]:
        keys, first = list(batch), next(iter(batch.values()))
        results = {key: one.output for key, one in batch.items()}
        pairs = [(one.tensor, one.output) for one in batch.values()]
        given = [tensor for tensor, _ in pairs if tensor is not None and tensor.numel()]
        taken = [output for _, output in pairs if output is not None and output.numel()]
        if not given:
            return results
        reducing = Reducing(first.reduction, first.prescale, first.postscale, len(members))
        memory = self._memory(set_id, members, keys) if given[0].device.type == "cpu" else None
        if first.reduction is Reduction.ADASUM:
            with self._around.activity(keys, "ADASUM_ALLREDUCE"):
                self._adasum(set_id, members, given, taken, reducing)
        elif len(members) == 1:
            for tensor, output in zip(given, taken, strict=True):
                reducing.after(reducing.before(output.detach().copy_(tensor.detach())))
        elif memory is not None:
            with self._around.activity(keys, memory.activity):
                memory.allreduce(given, taken, reducing)
        else:
            self._allreduce_by_group(self._group(set_id, members, given[0].device), keys, given, taken, reducing)
        return results

    def _allreduce_by_group(
        self,
        plane: GroupPlane,
        keys: Sequence[str],
        given: Sequence[torch.Tensor],
        taken: Sequence[torch.Tensor],
        reducing: Reducing,
    ) -> None:
        name = "NCCL_ALLREDUCE" if given[0].device.type == "cuda" else "GLOO_ALLREDUCE"
        if len(given) == 1:
            buffer = taken[0].detach()
            if taken[0].data_ptr() != given[0].data_ptr():
                buffer.copy_(given[0].detach())
        else:
            buffer = self._fusion.fill(keys, given)
        reducing.before(buffer)
        with self._around.activity(keys, name):
            plane.allreduce(buffer, reducing.reduction)
        reducing.after(buffer)
        if len(given) > 1:
            self._fusion.empty(keys, buffer, taken)

    def _adasum(
        self,
        set_id: int,
        members: Sequence[int],
        given: Sequence[torch.Tensor],
        taken: Sequence[torch.Tensor],
        reducing: Reducing,
    ) -> None:
        size = len(members)
        if size & (size - 1):
            raise HorovodInternalError(f"Running Adasum with non-power of 2 ranks is not supported yet: {size} ranks.")
        plane = self._group(set_id, members, given[0].device) if size > 1 else None
        for tensor, output in zip(given, taken, strict=True):
            own = reducing.before(tensor.detach().clone()).reshape(1, -1)
            rows = own if plane is None else plane.allgather(own, [1] * size)
            output.detach().copy_(reducing.after(adasum(list(rows))).reshape(output.shape))

    def _one(self, set_id: int, members: Sequence[int], item: Item, one: Submission) -> Any:
        place = members.index(self._around.rank)
        tensor = one.tensor
        assert tensor is not None
        tensor = tensor.detach()
        if one.kind is Kind.REDUCESCATTER:
            return self._reducescatter(set_id, members, item.key, one)
        if len(members) == 1:
            return _alone(one, tensor)
        plane = self._group(set_id, members, tensor.device)
        with self._around.activity([item.key], f"{'NCCL' if tensor.is_cuda else 'GLOO'}_{one.kind.name}"):
            if one.kind is Kind.ALLGATHER:
                return plane.allgather(tensor, item.details)
            if one.kind is Kind.ALLTOALL:
                assert one.splits is not None
                return plane.alltoall(tensor, one.splits, item.details), item.details
            assert one.output is not None
            output = one.output.detach()
            if place == members.index(one.root) and output.data_ptr() != tensor.data_ptr():
                output.copy_(tensor)
            plane.broadcast(output, members.index(one.root))
            return one.output

    def _reducescatter(self, set_id: int, members: Sequence[int], key: str, one: Submission) -> torch.Tensor:
        """All is reduced, and this rank's rows are kept; what does not come out even goes to the first ranks."""
        assert one.tensor is not None
        place = members.index(self._around.rank)
        total = torch.empty_like(one.tensor.detach())
        whole = Submission(
            kind=Kind.ALLREDUCE,
            tensor=one.tensor,
            output=total,
            reduction=one.reduction,
            prescale=one.prescale,
            postscale=one.postscale,
        )
        self._allreduce(set_id, members, {key: whole})
        rows, more = divmod(total.shape[0], len(members))
        start = place * rows + min(place, more)
        return total[start : start + rows + (place < more)].clone()

    def _group(self, set_id: int, members: Sequence[int], device: torch.device) -> GroupPlane:
        if (set_id, device.type) not in self._groups:
            around = self._around
            store = dist.PrefixStore(f"set/{set_id}/{device.type}", around.store)  # type: ignore[attr-defined]
            self._groups[set_id, device.type] = open_group(
                store, place=members.index(around.rank), size=len(members), device=device, timeout=around.timeout
            )
        return self._groups[set_id, device.type]

    def _memory(self, set_id: int, members: Sequence[int], keys: Sequence[str]) -> SharedMemoryPlane | None:
        """What reduces in shared memory, if all ranks of the process set can; else None, on all of them."""
        if set_id not in self._memories:
            layout = layout_of(members, self._around.hosts, self._around.rank)
            store = dist.PrefixStore(f"set/{set_id}/memory", self._around.store)  # type: ignore[attr-defined]
            self._memories[set_id] = None
            if layout is not None:
                with self._around.activity(keys, "INIT_FUSION_BUFFER"):
                    self._memories[set_id] = self._open_memory(set_id, layout, store)
        return self._memories[set_id]

    def _open_memory(self, set_id: int, layout: Layout, store: Any) -> SharedMemoryPlane | None:
        around, slots, across = self._around, None, None
        check, seconds = around.check, around.timeout.total_seconds()
        if is_ordered_here():
            own_store = dist.PrefixStore(f"host/{layout.host}", store)  # type: ignore[attr-defined]
            slots = open_slots(
                own_store, ranks=layout.ranks, place=layout.local_place, check=check, timeout_seconds=seconds
            )
        if layout.host_count > 1:
            has = slots is not None and around.reduces_by_hosts
            size = layout.host_count * len(layout.ranks)
            if not all_have(store, has, size=size, check=check, timeout_seconds=seconds):
                return None
            row = dist.PrefixStore(f"across/{layout.local_place}", store)  # type: ignore[attr-defined]
            cpu = torch.device("cpu")
            across = open_group(row, place=layout.host, size=layout.host_count, device=cpu, timeout=around.timeout)
            self._groups[set_id, "across"] = across
        if slots is None:
            return None
        return SharedMemoryPlane(slots, check=check, timeout_seconds=seconds, across=across)


def _alike(keys: Sequence[str], batch: Sequence[Submission]) -> list[dict[str, Submission]]:
    """The parts of a batch that can stand in one buffer: a group may have tensors of several types."""
    parts: dict[Any, dict[str, Submission]] = {}
    for key, one in zip(keys, batch, strict=True):
        kind = None if one.tensor is None else (one.tensor.dtype, one.tensor.device.type)
        parts.setdefault(kind, {})[key] = one
    return list(parts.values())


def _alone(one: Submission, tensor: torch.Tensor) -> Any:
    if one.kind is Kind.ALLGATHER:
        return tensor.clone() if tensor.dim() else tensor.reshape(1).clone()
    if one.kind is Kind.ALLTOALL:
        return tensor.clone(), (len(tensor),)
    assert one.output is not None
    one.output.detach().copy_(tensor)
    return one.output
