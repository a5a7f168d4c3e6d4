"""Rank 0's scheduling: every rank executes the submitted operations in one order, compatible ones fused into one batch.

The coordinator uses no sockets, clocks or tensors, and only writes to the timeline. `submit` takes what the ranks have
ready. `schedule` returns the batches that the ranks must execute.

Note [one order]: operations of different process sets are put into one order, too. Every rank executes its own
operations in that order, so two overlapping sets never wait for each other.

Note [response cache]: an operation that a rank has described in full gets a cache id, and the rank then submits only
the id. The cache has `capacity` entries and evicts the least recently used one. The coordinator asks a rank that
submits an evicted id to submit the full description again. Horovod calls this its response cache.

Note [waiting ranks]: a rank whose only submitting thread has waited for a while reports what it waits for, so it
submits nothing before that ends. If ranks wait for each other in different operations, all of them get an error.

The requests of all ranks for one key must match, and ranks may not wait for each other without end. The error texts of
requests that do not match are Horovod's, followed by the operation and the ranks. Groups need no check: they are part
of the key.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from rankless.errors import CollectiveError
from rankless.extensions.horovod.engine.coordinator_table import (
    ScheduledBatch,
    ScheduledOperation,
    SubmittedOperation,
    SubmittedOperations,
)
from rankless.extensions.horovod.engine.messages import RequestMetadata
from rankless.extensions.horovod.engine.requests import UNNAMED_PREFIX
from rankless.extensions.horovod.engine.timeline import Timeline
from rankless.records.number_formatting import format_ranks


def find_mismatch(key: str, requests: Mapping[int, RequestMetadata], joined: Sequence[int]) -> str:
    """Return how the requests for a key differ, or an empty string. The requests are by rank."""
    ranks = sorted(requests)
    first = requests[ranks[0]]
    for rank in ranks[1:]:
        other = requests[rank]
        if other is not first and other != first and (text := _compare(first, other)):
            alike = [one for one in ranks if requests[one] is first or not _compare(first, requests[one])]
            differing = [one for one in ranks if _compare(first, requests[one]) == text]
            return f"{text} Operation {key}: the first is {format_ranks(alike)}, the other {format_ranks(differing)}."
    if joined and first.kind != "allreduce":
        return f"{_format_join_error(first.kind)} Operation {key}: joined is {format_ranks(joined)}."
    if first.kind == "allgather" and not first.shape:
        return f"Rank zero tried to gather a rank-zero tensor. Operation {key}."
    return ""


def _compare(first: RequestMetadata, other: RequestMetadata) -> str:
    kind = first.kind.upper()
    if first.kind != other.kind:
        return f"Mismatched operations: One rank did an {kind}, but another rank did an {other.kind.upper()}."
    if first.kind in ("add_process_set", "remove_process_set"):
        return _compare_process_sets(first, other)
    if first.dtype != other.dtype:
        return f"Mismatched data types: One rank had type {first.dtype}, but another rank had type {other.dtype}."
    if first.device != other.device:
        here, there = ("CPU" if item.device == "cpu" else "GPU" for item in (first, other))
        return (
            f"Mismatched {kind} CPU/GPU device selection: One rank specified device {here}, "
            f"but another rank specified device {there}."
        )
    return _compare_shapes(first, other) or _compare_settings(first, other)


def _compare_process_sets(first: RequestMetadata, other: RequestMetadata) -> str:
    if first.ranks != other.ranks:
        return (
            f"Mismatched process sets: One rank added a process set of ranks {list(first.ranks)}, "
            f"but another rank added one of ranks {list(other.ranks)}."
        )
    if first.root != other.root:
        return (
            f"Mismatched process sets: One rank removed process set {first.root}, "
            f"but another rank removed process set {other.root}."
        )
    return ""


def _compare_shapes(first: RequestMetadata, other: RequestMetadata) -> str:
    prefix = f"Mismatched {first.kind.upper()} tensor shapes: One rank sent a tensor"
    if first.kind in ("allgather", "alltoall"):
        if len(first.shape) != len(other.shape):
            return f"{prefix} of rank {len(first.shape)}, but another rank sent a tensor of rank {len(other.shape)}."
        for dim in range(1, len(first.shape)):
            if first.shape[dim] != other.shape[dim]:
                return (
                    f"{prefix} with dimension {dim} equal to {first.shape[dim]}, "
                    f"but another rank sent a tensor with dimension {dim} equal to {other.shape[dim]}."
                )
    elif first.shape != other.shape:
        return f"{prefix} of shape {list(first.shape)}, but another rank sent a tensor of shape {list(other.shape)}."
    return ""


def _compare_settings(first: RequestMetadata, other: RequestMetadata) -> str:
    if first.root != other.root:
        return (
            f"Mismatched {first.kind.upper()} root ranks: One rank specified root rank {first.root}, "
            f"but another rank specified root rank {other.root}."
        )
    if first.reduction != other.reduction:
        return (
            f"Mismatched reduction operation: One rank sent reduction op {first.reduction}, "
            f"but another rank sent reduction op {other.reduction}."
        )
    if (first.prescale, first.postscale) != (other.prescale, other.postscale):
        return (
            "Mismatched prescale and/or postscale factors: "
            f"One rank sent factors ({first.prescale:g}, {first.postscale:g}), "
            f"but another rank sent factors ({other.prescale:g}, {other.postscale:g})."
        )
    return ""


def _format_join_error(kind: str) -> str:
    hint = " Specify sparse_to_dense=True if using DistributedOptimizer." if kind == "allgather" else ""
    return f"{kind.capitalize()} is not supported with Join at this time.{hint}"


Waits = Mapping[int, Sequence[tuple[SubmittedOperation, Sequence[int]]]]
"""By waiting rank: the operations that it waits for, each with the ranks that have not submitted it."""
MAX_LISTED = 8
"""How many operations an error text lists."""


def find_deadlock(waits: Waits) -> dict[int, list[tuple[SubmittedOperation, Sequence[int]]]]:
    """Return the waits that cannot end: each is for a rank that waits without end itself.

    A rank that waits for several operations waits until all have ended.
    """
    stuck = set(waits)
    while True:
        found = {
            rank: [(one, missing) for one, missing in waits[rank] if not stuck.isdisjoint(missing)] for rank in stuck
        }
        remaining = {rank for rank, each in found.items() if each}
        if remaining == stuck:
            return found
        stuck = remaining


def format_deadlock(found: Mapping[int, Sequence[tuple[SubmittedOperation, Sequence[int]]]]) -> str:
    """Return an error text that names the operations and ranks."""
    waiting: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank in sorted(found):
        submitted, missing = found[rank][0]
        waiting.setdefault((submitted.key, tuple(missing)), []).append(rank)
    texts = [
        f"{format_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} in {key}, which {format_ranks(missing)} "
        f"{'has' if len(missing) == 1 else 'have'} not submitted"
        for (key, missing), ranks in waiting.items()
    ]
    more = f"; and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    error = CollectiveError(
        expected="every rank of a process set to submit the same operations",
        found="; ".join(texts[:MAX_LISTED]) + more,
        fix="give an operation the same kind, name, group size and process set on every rank; unnamed operations are "
        "matched by their order",
    )
    return str(error)


Combine = Callable[[RequestMetadata, Sequence[bytes], int], bytes]
"""Reduces the values of the ranks that take part, in rank order. The last argument is the size of the process set."""

ITEM_BYTES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
ALL_RANKS = 0
TENSOR_KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
"""Operations on tensors. The ranks only agree on the others."""


@dataclass(frozen=True)
class ReadyGroup:
    """Operations that all ranks have ready and execute together."""

    operations: tuple[SubmittedOperation, ...]
    joined: tuple[int, ...]
    """Ranks that take part with zeros."""
    error: str

    @property
    def transfers_data(self) -> bool:
        """Whether the ranks must communicate to execute it."""
        requests = [one.request for one in self.operations]
        return not self.error and any(one.kind in TENSOR_KINDS and not one.is_inline for one in requests)

    @property
    def byte_count(self) -> int:
        """The size of one rank's tensors."""
        return sum(count_bytes(one.request) for one in self.operations)


@dataclass
class CachedOperation:
    """The operation that a cache id stands for, as each rank has described it."""

    set_id: int
    key: str
    requests: dict[int, RequestMetadata] = field(default_factory=dict)


class Coordinator:
    """Records which rank has which operation ready, and decides what the ranks execute next."""

    def __init__(
        self,
        size: int,
        *,
        combine: Combine,
        capacity: int = 1024,
        fusion_bytes: int = 128 << 20,
        splits_groups: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        self.process_sets: dict[int, tuple[int, ...]] = {ALL_RANKS: tuple(range(size))}
        self._combine = combine
        self._capacity = capacity
        self._fusion_bytes = fusion_bytes
        self._splits_groups = splits_groups
        self._timeline = timeline or Timeline()
        self._next_set = 1
        self._submitted = SubmittedOperations()
        self._waiting: dict[int, tuple[Sequence[tuple[int, str]], float]] = {}
        """What ranks wait for, and since when they have reported it."""
        self._incomplete_groups: dict[tuple[int, str], list[SubmittedOperation]] = {}
        self._ready: list[ReadyGroup] = []
        self._joined: dict[int, None] = {}
        self._cache: OrderedDict[int, CachedOperation] = OrderedDict()
        self._cache_ids: dict[tuple[int, str], int] = {}
        self._last_cache_id = -1

    def submit(self, rank: int, request: RequestMetadata, values: bytes, now: float) -> None:
        """Record that a rank has an operation ready, which it describes in full."""
        self._waiting.pop(rank, None)
        if request.kind == "join":
            self._join(rank, now)
            return
        submitted = self._submitted.get_or_create(request.set_id, request.key, rank, now)
        submitted.has_full_metadata = True
        self._add(submitted, rank, request, values)
        entry = self._cache.get(self._cache_ids.get((request.set_id, request.key), -1))
        if entry is not None:
            entry.requests[rank] = request

    def submit_cached(self, rank: int, cache_id: int, values: bytes, now: float) -> bool:
        """Record that a rank has a cached operation ready. Returns False if the rank must describe it in full."""
        entry = self._cache.get(cache_id)
        request = None if entry is None else entry.requests.get(rank)
        if entry is None or request is None:
            return False
        self._waiting.pop(rank, None)
        self._cache.move_to_end(cache_id)
        self._add(self._submitted.get_or_create(entry.set_id, entry.key, rank, now), rank, request, values)
        return True

    def refuse(self, rank: int, operation_id: tuple[int, str], reason: str, now: float) -> None:
        """Record that a rank refuses an operation: it fails on the ranks that submit it."""
        submitted = self._submitted.get_or_create(*operation_id, rank, now)
        submitted.refusals[rank] = reason
        self._advance(submitted)

    def wait(self, rank: int, operation_ids: Sequence[tuple[int, str]], now: float) -> None:
        """Record that a rank submits nothing before these operations have ended. Without any, it waits no more."""
        before, since = self._waiting.pop(rank, ((), now))
        if operation_ids:
            self._waiting[rank] = (operation_ids, since if before == operation_ids else now)

    def break_deadlock(self, *, before: float) -> None:
        """Fail the operations in which ranks have waited for each other since before that time."""
        if len(self._waiting) < 2:
            return
        waits = {
            rank: [
                (one, one.find_missing(self.process_sets.get(one.set_id, ()), self._joined))
                for one in (self._submitted.get(operation_id, rank) for operation_id in ids)
                if one is not None
            ]
            for rank, (ids, since) in self._waiting.items()
            if since < before
        }
        found = find_deadlock(waits)
        text = format_deadlock(found) if found else ""
        for rank, blocked in found.items():
            self._waiting.pop(rank, None)
            for submitted, _ in blocked:
                self._fail(submitted, text)

    def schedule(self, *, is_idle: bool) -> Iterator[ScheduledBatch]:
        """Yield the next batches.

        Unless rank 0 `is_idle`, only operations without data transfer are scheduled. The others wait, and are fused
        into larger batches.
        """
        immediate = [group for group in self._ready if not group.transfers_data]
        self._ready = [group for group in self._ready if group.transfers_data]
        for group in immediate:
            yield self._make_batch([group])
        while is_idle and self._ready:
            batch = self._make_batch(self._take_fusible())
            yield batch
            is_idle = 0 not in batch.members

    @property
    def has_ready(self) -> bool:
        """Whether operations are ready and not scheduled."""
        return bool(self._ready)

    def find_missing_ranks(self, *, before: float) -> dict[int, list[str]]:
        """Return, by rank, the keys of operations that others submitted before that time and this rank did not."""
        missing: dict[int, list[str]] = {}
        for submitted in self._submitted:
            if submitted.since < before:
                for rank in submitted.find_missing(self.process_sets[submitted.set_id], self._joined):
                    missing.setdefault(rank, []).append(submitted.key)
        return dict(sorted(missing.items()))

    def _add(self, submitted: SubmittedOperation, rank: int, request: RequestMetadata, values: bytes) -> None:
        self._timeline.record_submission(submitted.key, request.kind, rank)
        submitted.requests[rank] = request
        if request.is_inline:
            submitted.values[rank] = values
        self._advance(submitted)

    def _advance(self, submitted: SubmittedOperation) -> None:
        """Mark the operation as ready if every rank that has not joined has submitted it."""
        members = self.process_sets.get(submitted.set_id, ())
        if len(submitted.requests) < len(members) and submitted.find_missing(members, self._joined):
            return
        self._submitted.remove(submitted)
        if submitted.refusals:
            self._add_failed([submitted], submitted.format_refusals())
            return
        request = submitted.request
        if request.kind == "barrier":
            self._submitted.forget_refused(None if submitted.set_id == ALL_RANKS else submitted.set_id)
        if not request.group or self._splits_groups:
            self._timeline.end_negotiation(submitted.key, is_whole=True)
            self._ready.append(self._make_group([submitted]))
            return
        group = self._incomplete_groups.setdefault((submitted.set_id, request.group), [])
        group.append(submitted)
        self._timeline.end_negotiation(submitted.key, is_whole=len(group) == request.group_size)
        if len(group) == request.group_size:
            for one in group:
                self._timeline.end_group_wait(one.key)
            self._ready.append(self._make_group(self._incomplete_groups.pop((submitted.set_id, request.group))))

    def _fail(self, submitted: SubmittedOperation, text: str) -> None:
        """Fail an operation that not all ranks have submitted, and those of its group."""
        group = submitted.request.group
        alike = [
            one
            for one in self._submitted
            if one is submitted or (group and _get_group(one) == (submitted.set_id, group))
        ]
        for one in alike:
            self._submitted.remove(one)
        waiting = self._incomplete_groups.pop((submitted.set_id, group), []) if group else []
        for one in waiting:
            self._timeline.end_group_wait(one.key)
        self._add_failed(alike, text)
        self._add_failed(waiting, text)

    def _add_failed(self, operations: Sequence[SubmittedOperation], text: str) -> None:
        for one in operations:
            self._timeline.end_negotiation(one.key, is_whole=True)
            if one.requests:
                self._ready.append(ReadyGroup((one,), (), text))

    def _make_group(self, operations: Sequence[SubmittedOperation]) -> ReadyGroup:
        first = operations[0]
        members = self.process_sets.get(first.set_id, ())
        joined = tuple(rank for rank in members if rank in self._joined) if first.request.kind in TENSOR_KINDS else ()
        errors = (find_mismatch(one.key, one.requests, joined) for one in operations)
        return ReadyGroup(tuple(operations), joined, next((text for text in errors if text), ""))

    def _join(self, rank: int, now: float) -> None:
        self._timeline.record_submission("join", "join", rank)
        self._joined[rank] = None
        if len(self._joined) == len(self.process_sets[ALL_RANKS]):
            self._joined = {}
            self._submitted.forget_refused(None)
            self._timeline.end_negotiation("join", is_whole=True)
            request = RequestMetadata(kind="join", key="join", root=rank)
            submitted = SubmittedOperation(ALL_RANKS, "join", now, requests={rank: request})
            self._ready.append(ReadyGroup((submitted,), (), ""))
            return
        for submitted in self._submitted:
            self._advance(submitted)

    def _take_fusible(self) -> list[ReadyGroup]:
        """Remove and return the first ready group, and the later ones that can be fused with it."""
        first, *others = self._ready
        batch, rest = [first], []
        fusion_key, size = _get_fusion_key(first), first.byte_count
        for group in others:
            more = group.byte_count
            if fusion_key is not None and _get_fusion_key(group) == fusion_key and size + more <= self._fusion_bytes:
                batch.append(group)
                size += more
            else:
                rest.append(group)
        self._ready = rest
        return batch

    def _make_batch(self, groups: Sequence[ReadyGroup]) -> ScheduledBatch:
        set_id = groups[0].operations[0].set_id
        members = self.process_sets.get(set_id, ())
        operations = [self._make_scheduled(one, group, len(members)) for group in groups for one in group.operations]
        return ScheduledBatch(set_id, members, tuple(operations))

    def _make_scheduled(self, submitted: SubmittedOperation, group: ReadyGroup, size: int) -> ScheduledOperation:
        request = submitted.request
        if group.error:
            self._evict(submitted)
            return ScheduledOperation(submitted, (), group.error)
        values = b""
        if request.is_inline:
            values = self._combine(request, [submitted.values[rank] for rank in sorted(submitted.values)], size)
        cache_id = self._assign_cache_id(submitted) if request.kind in TENSOR_KINDS else -1
        return ScheduledOperation(submitted, group.joined, "", cache_id, self._update_process_sets(request), values)

    def _update_process_sets(self, request: RequestMetadata) -> tuple[int, ...]:
        """Add or remove a process set if that is requested, and return the result for the ranks."""
        if request.kind == "add_process_set":
            self.process_sets[self._next_set] = request.ranks
            self._next_set += 1
            return (self._next_set - 1,)
        if request.kind == "remove_process_set":
            self.process_sets.pop(request.root, None)
            return (request.root,)
        return (request.root,) if request.kind == "join" else ()

    def _assign_cache_id(self, submitted: SubmittedOperation) -> int:
        """Return the operation's cache id if a rank must learn it, else -1."""
        if not submitted.has_full_metadata or not self._capacity or _is_unnamed(submitted.key):
            return -1
        operation_id = (submitted.set_id, submitted.key)
        cache_id = self._cache_ids.get(operation_id)
        if cache_id is None:
            cache_id = self._cache_ids[operation_id] = self._last_cache_id = self._last_cache_id + 1
            self._cache[cache_id] = CachedOperation(*operation_id)
            if len(self._cache) > self._capacity:
                _, oldest = self._cache.popitem(last=False)
                del self._cache_ids[oldest.set_id, oldest.key]
        self._cache[cache_id].requests.update(submitted.requests)
        return cache_id

    def _evict(self, submitted: SubmittedOperation) -> None:
        cache_id = self._cache_ids.pop((submitted.set_id, submitted.key), None)
        if cache_id is not None:
            del self._cache[cache_id]


def round_fusion_threshold(threshold: int, local_size: int) -> int:
    """Return the largest batch in bytes: the threshold rounded up so that the ranks of a host get equal shares.

    Horovod rounds in the same way.
    """
    unit = local_size * 8 * 64
    return -(-threshold // unit) * unit


def count_bytes(request: RequestMetadata) -> int:
    """Return the size of a request's tensor."""
    return prod(request.shape) * ITEM_BYTES.get(request.dtype, 4)


def _get_group(submitted: SubmittedOperation) -> tuple[int, str]:
    return submitted.set_id, submitted.request.group


def _is_unnamed(key: str) -> bool:
    """Whether no later operation has this key."""
    return key.partition(".")[2].startswith(UNNAMED_PREFIX)


def _get_fusion_key(group: ReadyGroup) -> tuple[object, ...] | None:
    """Return the properties that fused operations share, or None if the group cannot be fused with others."""
    found = {
        (one.set_id, one.request.dtype, one.request.device, one.request.reduction, *_get_factors(one.request))
        for one in group.operations
        if one.request.kind == "allreduce"
    }
    is_alike = len(found) == 1 and all(one.request.kind == "allreduce" for one in group.operations)
    return found.pop() if is_alike else None


def _get_factors(request: RequestMetadata) -> tuple[float, float]:
    return request.prescale, request.postscale
