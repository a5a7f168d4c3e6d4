"""Rank 0's judgement: what every rank has ready is executed, in one order for all, what fits together as one.

Pure but for the timeline, which it tells: no sockets, no clock, no tensors. `submit` takes what ranks have ready,
`decide` gives what is to be told to them.

Note [one order]: operations of different process sets are put in one order, too. Every rank executes its own in that
order, so two sets that overlap can never wait for each other.

Note [numbers]: an operation that has been described in full gets a number, which stands for it from then on. Who sends
a number that has been forgotten (there are at most `capacity`, the least used go first) is asked to describe it anew.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from rankless.compat.horovod.engine.consistency_check import disagreement
from rankless.compat.horovod.engine.messages import Execute, Item, Request
from rankless.compat.horovod.engine.requests import UNNAMED
from rankless.compat.horovod.engine.timeline import Timeline

Combine = Callable[[Request, Sequence[bytes], int], bytes]
"""The reduced values of a request, from those of the ranks that take part, in their order, and the size of the set."""

ITEM_BYTES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
ALL_RANKS = 0
MOVING = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
"""Operations on tensors; the others are only agreed upon."""


@dataclass
class Waiting:
    """An operation that some ranks have ready."""

    set_id: int
    key: str
    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    values: dict[int, bytes] = field(default_factory=dict)
    was_described: bool = False
    """In full by some rank, who is to learn its number."""

    @property
    def request(self) -> Request:
        """One of them; the others agree with it."""
        return next(iter(self.requests.values()))


@dataclass(frozen=True)
class Unit:
    """Operations that all ranks have ready and that are executed together."""

    operations: tuple[Waiting, ...]
    joined: tuple[int, ...]
    """Ranks that take part with zeros."""
    error: str

    @property
    def moves(self) -> bool:
        """Whether ranks must come together to execute it."""
        requests = [one.request for one in self.operations]
        return not self.error and any(one.kind in MOVING and not one.rides for one in requests)

    @property
    def byte_count(self) -> int:
        """Of one rank's tensors."""
        return sum(byte_count(one.request) for one in self.operations)


@dataclass
class Known:
    """What a number stands for, as each rank has described it."""

    set_id: int
    key: str
    requests: dict[int, Request] = field(default_factory=dict)


@dataclass(frozen=True)
class Chosen:
    """An operation that all have ready."""

    waiting: Waiting
    joined: tuple[int, ...]
    error: str
    number: int = -1
    answer: tuple[int, ...] = ()
    values: bytes = b""

    def item(self, rank: int, members: Sequence[int]) -> Item:
        """What a rank is told of it."""
        request = self.waiting.request
        return Item(
            key=self.waiting.key,
            number=self.number,
            error=self.error,
            details=self.answer or _details(request, self.waiting.requests, rank, members),
            request=request if rank in self.joined or request.kind == "add_process_set" else None,
            rides=request.rides and not self.error,
        )


@dataclass(frozen=True)
class Decision:
    """Operations to be executed as one by the ranks of a process set."""

    set_id: int
    members: tuple[int, ...]
    chosen: tuple[Chosen, ...]

    @property
    def values(self) -> list[bytes]:
        """Of the items that ride, in their order."""
        return [one.values for one in self.chosen if one.waiting.request.rides and not one.error]

    @property
    def is_same_for_all(self) -> bool:
        """Whether every rank is told the same."""
        return not any(one.joined or one.waiting.request.kind == "alltoall" for one in self.chosen)

    def message(self, rank: int) -> Execute:
        """What a rank is told."""
        return Execute(self.set_id, tuple(one.item(rank, self.members) for one in self.chosen))


class Coordinator:
    """Who has what ready, and what comes next."""

    def __init__(
        self,
        size: int,
        *,
        combine: Combine,
        capacity: int = 1024,
        fusion_bytes: int = 128 << 20,
        splits: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        self.sets: dict[int, tuple[int, ...]] = {ALL_RANKS: tuple(range(size))}
        self._combine = combine
        self._capacity = capacity
        self._fusion_bytes = fusion_bytes
        self._splits_groups = splits
        self._timeline = timeline or Timeline()
        self._next_set = 1
        self._waiting: dict[tuple[int, str], Waiting] = {}
        self._groups: dict[tuple[int, str], list[Waiting]] = {}
        self._ready: list[Unit] = []
        self._joined: dict[int, None] = {}
        self._known: OrderedDict[int, Known] = OrderedDict()
        self._numbers: dict[tuple[int, str], int] = {}
        self._last_number = -1

    def submit(self, rank: int, request: Request, values: bytes, now: float) -> None:
        """A rank has something ready, described in full."""
        if request.kind == "join":
            self._join(rank, now)
            return
        waiting = self._wait(request.set_id, request.key, now)
        waiting.was_described = True
        self._add(waiting, rank, request, values)
        known = self._known.get(self._numbers.get((request.set_id, request.key), -1))
        if known is not None:
            known.requests[rank] = request

    def submit_again(self, rank: int, number: int, values: bytes, now: float) -> bool:
        """A rank has ready what a number stands for. False if it must describe it anew."""
        known = self._known.get(number)
        request = None if known is None else known.requests.get(rank)
        if known is None or request is None:
            return False
        self._known.move_to_end(number)
        self._add(self._wait(known.set_id, known.key, now), rank, request, values)
        return True

    def decide(self, *, is_idle: bool) -> Iterator[Decision]:
        """What is to be executed next. Unless `is_idle`, only what rank 0 need not execute: the rest waits, and grows
        into larger batches.
        """
        at_once = [unit for unit in self._ready if not unit.moves]
        self._ready = [unit for unit in self._ready if unit.moves]
        for unit in at_once:
            yield self._decision([unit])
        while is_idle and self._ready:
            decision = self._decision(self._take_batch())
            yield decision
            is_idle = 0 not in decision.members

    @property
    def has_ready(self) -> bool:
        """Whether something waits only until it is decided."""
        return bool(self._ready)

    def stalled(self, *, before: float) -> dict[int, list[str]]:
        """By rank, the keys of what others have submitted before then, and it has not."""
        missing: dict[int, list[str]] = {}
        for waiting in self._waiting.values():
            if waiting.since < before:
                for rank in self.sets[waiting.set_id]:
                    if rank not in waiting.requests and rank not in self._joined:
                        missing.setdefault(rank, []).append(waiting.key)
        return dict(sorted(missing.items()))

    def _wait(self, set_id: int, key: str, now: float) -> Waiting:
        found = self._waiting.get((set_id, key))
        if found is None:
            found = self._waiting[set_id, key] = Waiting(set_id, key, now)
        return found

    def _add(self, waiting: Waiting, rank: int, request: Request, values: bytes) -> None:
        self._timeline.negotiating(waiting.key, request.kind, rank)
        waiting.requests[rank] = request
        if request.rides:
            waiting.values[rank] = values
        self._advance(waiting)

    def _advance(self, waiting: Waiting) -> None:
        """Move it on if every rank that has not joined has it ready."""
        members = self.sets.get(waiting.set_id, ())
        if len(waiting.requests) < len(members) and not (
            self._joined and all(rank in waiting.requests or rank in self._joined for rank in members)
        ):
            return
        del self._waiting[waiting.set_id, waiting.key]
        request = waiting.request
        if not request.group or self._splits_groups:
            self._timeline.negotiated(waiting.key, is_whole=True)
            self._ready.append(self._unit([waiting]))
            return
        group = self._groups.setdefault((waiting.set_id, request.group), [])
        group.append(waiting)
        self._timeline.negotiated(waiting.key, is_whole=len(group) == request.group_size)
        if len(group) == request.group_size:
            for one in group:
                self._timeline.gathered(one.key)
            self._ready.append(self._unit(self._groups.pop((waiting.set_id, request.group))))

    def _unit(self, operations: Sequence[Waiting]) -> Unit:
        first = operations[0]
        members = self.sets.get(first.set_id, ())
        joined = tuple(rank for rank in members if rank in self._joined) if first.request.kind in MOVING else ()
        errors = (disagreement(one.requests, joined) for one in operations)
        return Unit(tuple(operations), joined, next((text for text in errors if text), ""))

    def _join(self, rank: int, now: float) -> None:
        self._timeline.negotiating("join", "join", rank)
        self._joined[rank] = None
        if len(self._joined) == len(self.sets[ALL_RANKS]):
            self._joined = {}
            self._timeline.negotiated("join", is_whole=True)
            request = Request(kind="join", key="join", root=rank)
            self._ready.append(Unit((Waiting(ALL_RANKS, "join", now, requests={rank: request}),), (), ""))
            return
        for waiting in list(self._waiting.values()):
            self._advance(waiting)

    def _take_batch(self) -> list[Unit]:
        """The first unit that is ready, and those after it that can be executed as one with it."""
        first, *others = self._ready
        batch, rest = [first], []
        common, size = _common_of(first), first.byte_count
        for unit in others:
            more = unit.byte_count
            if common is not None and _common_of(unit) == common and size + more <= self._fusion_bytes:
                batch.append(unit)
                size += more
            else:
                rest.append(unit)
        self._ready = rest
        return batch

    def _decision(self, batch: Sequence[Unit]) -> Decision:
        set_id = batch[0].operations[0].set_id
        members = self.sets.get(set_id, ())
        chosen = [self._chosen(one, unit, len(members)) for unit in batch for one in unit.operations]
        return Decision(set_id, members, tuple(chosen))

    def _chosen(self, waiting: Waiting, unit: Unit, size: int) -> Chosen:
        request = waiting.request
        if unit.error:
            self._forget(waiting)
            return Chosen(waiting, (), unit.error)
        values = b""
        if request.rides:
            values = self._combine(request, [waiting.values[rank] for rank in sorted(waiting.values)], size)
        number = self._number_of(waiting) if request.kind in MOVING else -1
        return Chosen(waiting, unit.joined, "", number, self._answer(request), values)

    def _answer(self, request: Request) -> tuple[int, ...]:
        if request.kind == "add_process_set":
            self.sets[self._next_set] = request.ranks
            self._next_set += 1
            return (self._next_set - 1,)
        if request.kind == "remove_process_set":
            self.sets.pop(request.root, None)
            return (request.root,)
        return (request.root,) if request.kind == "join" else ()

    def _number_of(self, waiting: Waiting) -> int:
        """The number by which it is called from now on, if somebody is to learn it."""
        if not waiting.was_described or not self._capacity or _is_unnamed(waiting.key):
            return -1
        place = (waiting.set_id, waiting.key)
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = self._last_number = self._last_number + 1
            self._known[number] = Known(*place)
            if len(self._known) > self._capacity:
                _, oldest = self._known.popitem(last=False)
                del self._numbers[oldest.set_id, oldest.key]
        self._known[number].requests.update(waiting.requests)
        return number

    def _forget(self, waiting: Waiting) -> None:
        number = self._numbers.pop((waiting.set_id, waiting.key), None)
        if number is not None:
            del self._known[number]


def fusion_limit(threshold: int, local_size: int) -> int:
    """How many bytes are fused at most: as Horovod, so many as can be dealt out evenly to the ranks of a host."""
    unit = local_size * 8 * 64
    return -(-threshold // unit) * unit


def byte_count(request: Request) -> int:
    """How large a request's tensor is."""
    return prod(request.shape) * ITEM_BYTES.get(request.dtype, 4)


def _is_unnamed(key: str) -> bool:
    """Whether nobody will ever use the key again."""
    return key.partition(".")[2].startswith(UNNAMED)


def _common_of(unit: Unit) -> tuple[object, ...] | None:
    """What operations that are executed as one have in common; None if these cannot be executed with others."""
    found = {
        (one.set_id, one.request.dtype, one.request.device, one.request.reduction, *_factors(one.request))
        for one in unit.operations
        if one.request.kind == "allreduce"
    }
    is_alike = len(found) == 1 and all(one.request.kind == "allreduce" for one in unit.operations)
    return found.pop() if is_alike else None


def _factors(request: Request) -> tuple[float, float]:
    return request.prescale, request.postscale


def _details(request: Request, requests: Mapping[int, Request], rank: int, members: Sequence[int]) -> tuple[int, ...]:
    if len(requests) < len(members):
        return ()
    if request.kind == "allgather":
        return tuple(requests[member].shape[0] if requests[member].shape else 1 for member in members)
    if request.kind == "alltoall" and rank in members:
        place = members.index(rank)
        return tuple(requests[member].splits[place] for member in members)
    return ()
