"""Operations that all ranks make together count for all of them or for none, also if one of them raises an exception.

Note [failed operations]: a rank that raises in an operation leaves collectives in which the others wait. If the script
catches the exception, its next call must not meet their last one. So the rank ends its process groups, which wakes the
others up, and all ranks tell each other through the store of the group in which operation they are and what they have
raised. If all are in the same operation, none has finished it. All raise the exception of the first rank that has one
of its own, open their groups again, take that rank's random generators, and may go on. Otherwise a rank has already
made what another one has not. Then all raise, and each later operation raises again: the run ends with an error.

An operation has an attempt, which changes nothing that lasts, and then a part that does: a job sets gradients and
makes its step. An exception in that part ends the run, unless all ranks raise it alike. An exception before an
operation (in its arguments, or while a loader reads) belongs to the next one. An operation that succeeds costs no
message, because a rank that has left one too early meets the others in the next one. If a worker is lost while others
tell each other what they have raised, all that are left repeat the operation, as after any loss.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from sys import exception
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakSet

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rankless.collectives.backends.process_group import SharedMemoryProcessGroup
from rankless.collectives.backends.store_exchange import StoreExchange
from rankless.collectives.byte_messages import broadcast_bytes
from rankless.context.exception_serialization import RaisedError, describe_error, is_of_another_rank, make_same_error
from rankless.errors import CollectiveError, RanklessError, RanksDiverged
from rankless.ownership.state_owner import StateOwner
from rankless.parallel.default_generator import save_generators
from rankless.parallel.mesh import Mesh
from rankless.records.encoding import encode_json

Result = TypeVar("Result")
AnyWorld = TypeVar("AnyWorld", covariant=True)
Part = Literal["attempt", "lasting", "end"]

PATIENCE_SECONDS = 0.25
"""How long a rank that has raised waits for the others to raise too, before it ends the groups in which they wait."""
PATIENCE_WITH_OTHER_GROUPS_SECONDS = 5.0
"""The same if a group cannot be opened again: then the run ends."""
AGREEMENT_TIMEOUT = timedelta(minutes=30)
"""How long a rank that has raised waits for others to leave what they compute. The watchdog reports it long before."""


class Outcome(msgspec.Struct, frozen=True):
    """What a rank tells the others about an operation that it could not finish."""

    number: int
    """How many operations it has begun, this one included."""
    part: Part
    error: RaisedError | None
    """Its own exception; None if it was only interrupted."""
    ends: bool = False
    """Whether ranks cannot go on after it."""


class ReaderProcesses(Protocol):
    """Processes of a loader, which this process starts again after another worker was lost."""

    def stop(self) -> None:
        """End them."""
        ...


class Recovery(Protocol[AnyWorld]):
    """Makes operations of all workers that go on without those that are lost; see Note [operations] in `world`."""

    readers: "WeakSet[ReaderProcesses]"
    """The processes that read batches for this one."""

    @property
    def world(self) -> AnyWorld:
        """The world of the workers that are left."""
        ...

    @property
    def world_of_last_operation(self) -> AnyWorld:
        """The world of the last operation; see `World.of_last_operation`."""
        ...

    @property
    def owner(self) -> StateOwner:
        """The owner that has the states; see `World.present_owner`."""
        ...

    def run(
        self,
        attempt: Callable[[AnyWorld], Result],
        *,
        commits: Callable[[], bool] = lambda: False,
        is_in_step: bool = False,
    ) -> Result:
        """Return what an operation returns; see `World.run_for_all`.

        Args:
            attempt: Makes the operation in a world.
            commits: Whether a step that participants count follows the operation.
            is_in_step: Whether the operation is a part of a step, which the one before has begun and which counts.
        """
        ...

    def is_interrupted(self) -> bool:
        """Return whether a worker has been lost, and the others have not formed a group anew."""
        ...

    def has_lost(self, error: BaseException) -> bool:
        """Return whether a worker was lost: whether the agent says so, or soon will.

        Args:
            error: What a call has raised that all workers make.
        """
        ...

    def recover(self) -> None:
        """Form a group without lost workers. Called in the handler of an error, which it raises again in operations."""
        ...


class _WorkerLost(Exception):
    """A worker was lost while ranks told each other what they have raised."""


class Operations:
    """The operations of all ranks, as this rank makes them. See Note [failed operations].

    Args:
        recovery: Knows of lost workers. Default: none may be lost.
    """

    def __init__(self, recovery: Recovery[Any] | None = None) -> None:
        self._recovery = recovery
        self._group: dist.ProcessGroup | None = None
        """The group of the last exchange."""
        self._number = 0
        self._failures = 0
        self._series: int | None = None
        """Separates its values in the store from those of others before it."""
        self._begun_at = 0
        """The number of the last sync point before the operation."""
        self._begun_with: object = None
        """What counts them. After a worker was lost, another object counts from 0."""
        self._is_inside = False
        self._last_error: RanksDiverged | None = None
        """Why the ranks cannot make another operation."""

    def run(
        self,
        find_mesh: Callable[[], Mesh],
        attempt: Callable[[], Result],
        *,
        generators: Callable[[], Iterable[torch.Generator]] = tuple,
    ) -> Result:
        """Return what an attempt returns. Within another operation it is a part of that.

        Args:
            find_mesh: Returns the ranks that make the operation: others after a worker was lost.
            attempt: Makes it, and changes nothing that lasts.
            generators: Returns the generators that it draws from besides PyTorch's own, in the same order on all ranks.

        Raises:
            Exception: An exception of this rank or of another one, the same on all ranks.
            RanksDiverged: The ranks cannot go on after an earlier exception.
        """
        mesh = find_mesh()
        if not self._is_new(mesh):
            return attempt()
        self.begin(mesh)
        before = exception()
        self._is_inside = True
        try:
            while True:
                try:
                    return attempt()
                except Exception as error:
                    try:
                        agreed = self._agree(find_mesh(), error, before, "attempt", generators)
                    except _WorkerLost:
                        assert self._recovery is not None
                        self._recovery.recover()
                        continue
                    raise agreed from agreed.__cause__
        finally:
            self._is_inside = False

    def begin(self, mesh: Mesh) -> None:
        """Begin an operation without an attempt: `change` follows."""
        if self._is_new(mesh):
            self._require_going()
            self._number += 1
            self._begun_with = mesh.desync_detector
            self._begun_at = 0 if mesh.desync_detector is None else mesh.desync_detector.number

    @contextmanager
    def prepare(self, mesh: Mesh) -> Iterator[None]:
        """Within the context, an exception belongs to the operation that comes next."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            if not self._is_new(mesh):
                raise
            failed = error
        if failed is not None:
            self._raise_in_operation(failed, mesh)

    @contextmanager
    def change(self, mesh: Mesh) -> Iterator[None]:
        """Within the context, the last operation changes what lasts. An exception of some ranks only ends the run."""
        if not self._is_new(mesh):
            yield
            return
        before = exception()
        self._is_inside = True
        try:
            yield
        except Exception as error:
            try:
                agreed = self._agree(mesh, error, before, "lasting")
            except _WorkerLost:
                agreed = error
            raise agreed from agreed.__cause__
        finally:
            self._is_inside = False

    def end(self, mesh: Mesh) -> None:
        """Tell ranks that have raised, and wait for this one, that it makes no operation any more.

        Raises:
            RanksDiverged: The ranks could not go on after an exception.
        """
        if mesh.group is None:
            return
        self._require_going()
        if self._number and mesh.group in distributed_c10d._world.pg_map:  # the script may have destroyed it
            self._open_exchange(mesh).publish("outcome", _encode(Outcome(self._number, "end", None)))

    def _is_new(self, mesh: Mesh) -> bool:
        """Return whether what begins is an operation of several ranks, and no part of another one."""
        return mesh.group is not None and not self._is_inside

    def _require_going(self) -> None:
        if self._last_error is not None:
            raise self._last_error.with_traceback(None)

    def _agree(
        self,
        mesh: Mesh,
        error: Exception,
        before: BaseException | None,
        part: Part,
        generators: Callable[[], Iterable[torch.Generator]] = tuple,
    ) -> Exception:
        """Return what all ranks raise for an operation that this one could not finish. Collective.

        Raises _WorkerLost if a worker is lost meanwhile.
        """
        is_own = not is_of_another_rank(error, before)
        if isinstance(error, RanklessError):  # its text names the script's line; the frames are those of Rankless
            error = error.with_traceback(None)
        if is_own and isinstance(error, CollectiveError):
            return error  # the group has ended because a rank is gone, late or makes other calls
        described = describe_error(error) if is_own else None
        own = Outcome(self._number, part, described, ends=isinstance(error, RanksDiverged))
        outcomes = self._gather(mesh, own)
        if outcomes is None:
            self._check_losses()  # that ended the groups
        verdict = None if outcomes is None else find_failed_rank(outcomes)
        if outcomes is None or verdict is None:
            self._last_error = make_end(outcomes or {mesh.rank: own})
            if is_own:
                return error
            self._last_error.__cause__ = error
            return self._last_error
        first = outcomes[verdict].error
        assert first is not None
        if described is None or not described.is_like(first):
            same = make_same_error(first, rank=verdict)
            same.__cause__ = error
            error = same
        if any(outcome.ends for outcome in outcomes.values()):
            self._last_error = make_end(outcomes) if not isinstance(error, RanksDiverged) else error
            return error
        take_generators(mesh, verdict, generators())
        return error

    def _gather(self, mesh: Mesh, own: Outcome) -> dict[int, Outcome] | None:
        """Return the outcomes of all ranks, whose groups can be used again; None if that cannot be had. Collective."""
        groups = list_groups(mesh)
        shared = [group for group in groups if isinstance(group, SharedMemoryProcessGroup)]
        ends = [group.end_error for group in shared]
        if mesh.group not in distributed_c10d._world.pg_map or any(end and not is_of_another_rank(end) for end in ends):
            return None  # the script has destroyed or aborted a group, or a rank is gone
        exchange = self._open_exchange(mesh)
        self._failures += 1
        exchange.check = self._check_losses
        exchange.publish("outcome", _encode(own))
        can_reopen = len(shared) == len(groups)
        is_interrupted = own.error is None and any(ends)
        if is_interrupted or not self._await_all(exchange, mesh, own.part, is_patient=not can_reopen):
            if not can_reopen:
                return None
            for group in shared:
                group.interrupt()
        texts = [exchange.wait_for("outcome", rank) for rank in range(mesh.size)]
        outcomes = {rank: msgspec.json.decode(text, type=Outcome) for rank, text in enumerate(texts)}
        if any(outcome.part == "end" for outcome in outcomes.values()):
            return outcomes
        number = 0 if mesh.desync_detector is None else mesh.desync_detector.number
        states = [f"{group.end_error is not None} {group.operation_count}" for group in shared]
        states_of_all = [text.split("/") for text in exchange.gather("groups", "/".join([str(number), *states]))]
        if mesh.desync_detector is not None:
            mesh.desync_detector.number = max(int(each[0]) for each in states_of_all)
        if any(each[1:] != states_of_all[0][1:] or "True" in " ".join(each[1:]) for each in states_of_all):
            for group in shared:
                group.reopen(self._failures, check=self._check_losses)
        return outcomes

    def _raise_in_operation(self, error: Exception, mesh: Mesh) -> None:
        """Make an operation that raises an exception. Others may make it again, without a worker that is lost."""
        recovery = self._recovery

        def attempt(_world: object = None) -> None:
            raise error

        if recovery is None:
            self.run(lambda: mesh, attempt)
        else:
            self.run(lambda: recovery.world.mesh, lambda: recovery.run(attempt))

    def _check_losses(self) -> None:
        if self._recovery is not None and self._recovery.is_interrupted():
            raise _WorkerLost

    def _await_all(self, exchange: StoreExchange, mesh: Mesh, part: Part, *, is_patient: bool) -> bool:
        """Return whether all ranks raise, too; False when all others have begun the operation, and wait in it."""
        seconds = PATIENCE_WITH_OTHER_GROUPS_SECONDS if is_patient else PATIENCE_SECONDS
        deadline = time.monotonic() + seconds
        detector = mesh.desync_detector
        begun_at = self._begun_at if detector is self._begun_with else 0
        while not exchange.have_all("outcome"):
            exchange.check()
            if time.monotonic() > deadline:
                waiting = exchange.list_missing("outcome")
                if part == "lasting" or detector is None or detector.have_reached(begun_at + 1, waiting):
                    return False
            time.sleep(0.002)
        return True

    def _open_exchange(self, mesh: Mesh) -> StoreExchange:
        assert mesh.group is not None
        store = distributed_c10d._world.pg_map[mesh.group][1]
        if mesh.group is not self._group:  # ranks may have counted differently in the group before
            self._group, self._series, self._failures = mesh.group, None, 0
        if self._series is None:  # a process may join again, and find the values of its first time in the store
            self._series = int(store.add(f"rankless/operations/{mesh.rank}", 1))
        return StoreExchange(
            store,
            f"rankless/operations {self._series}/failed {self._failures}",
            rank=mesh.rank,
            size=mesh.size,
            timeout=AGREEMENT_TIMEOUT,
            purpose="leave the operation in which one has raised",
        )


def find_failed_rank(outcomes: dict[int, Outcome]) -> int | None:
    """Return the rank whose exception all ranks raise; None if they cannot go on together."""
    failed = [rank for rank, outcome in outcomes.items() if outcome.error is not None]
    first = outcomes[failed[0]] if failed else None
    if first is None or first.error is None or len({(each.number, each.part) for each in outcomes.values()}) > 1:
        return None
    if first.part == "lasting":
        alike = [each.error is not None and each.error.is_like(first.error) for each in outcomes.values()]
        return failed[0] if all(alike) else None
    return next((rank for rank in failed if outcomes[rank].ends), failed[0])


def make_end(outcomes: dict[int, Outcome]) -> RanksDiverged:
    """Return the error of ranks that cannot go on after an exception."""
    raised = [
        f"rank {rank} raised {each.error.first_line}" for rank, each in outcomes.items() if each.error is not None
    ]
    others = [rank for rank, each in outcomes.items() if each.error is None]
    where = next((each.error.fields[3] for each in outcomes.values() if each.error and each.error.fields), None)
    went_on = f"; the others (first: rank {others[0]}) did not" if others else ""
    return RanksDiverged(
        expected="an exception in a call that all ranks make to be raised by all of them, before one of them has "
        "changed its model or has gone on",
        found=("; ".join(raised) or "ranks in different calls") + went_on,
        fix="correct the cause of the exception; a run cannot go on after it",
        where=where,
    )


def take_generators(mesh: Mesh, rank: int, others: Iterable[torch.Generator]) -> None:
    """Set the random generators to the states of the rank that has raised, as on one device. Collective."""
    states = save_generators(others)
    data = broadcast_bytes(b"".join(state.numpy().tobytes() for _, state in states), mesh=mesh, source=rank)
    if len(data) != sum(len(state) for _, state in states):
        return  # the ranks have drawn from other generators; the next call compares them
    start = 0
    for generator, state in states:
        part = data[start : start + len(state)]
        generator.set_state(torch.frombuffer(bytearray(part), dtype=torch.uint8))
        start += len(state)


def list_groups(mesh: Mesh) -> Sequence[dist.ProcessGroup]:
    """Return the process groups of a mesh: that of all ranks first."""
    return list(
        dict.fromkeys(group for group in (mesh.group, *(axis.group for axis in mesh.axes)) if group is not None)
    )


def _encode(outcome: Outcome) -> str:
    return encode_json(outcome).decode()
