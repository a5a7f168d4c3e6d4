"""Which workers continue after others were killed, as one pure function: state and event in, state and actions out.

Note [protocol of survivors]: who decides, and what is durable when.

- **Agent.** Host 0's agent decides alone, in the order in which it hears of events. Round 0 is the process group with
  which the run begins; a worker is `joined` once it has been in a round. A worker that is killed after all have joined
  is *lost*: its round ends (`EndRound`), and the next one starts (`StartRound`) when all living workers have asked.
  A round that a worker could not join ends for all its members. Where a loss is not allowed, or a worker has failed by
  itself, the run fails, and no round starts any more.
- **Replacement.** Before a round starts, the agent may have one of its members, on the host of a lost worker, fork a
  process that takes the place of the lost one (`Replace`): a copy with all that the member has passed. It is a worker
  like the others once it asks for the round, or once the member reports it (`Replaced`). The first worker is not copied
  if the script names ranks, because such scripts have it do what must happen once. If no operation of the script has
  counted since the last replacement, none is made: a call that kills its workers comes to an end.
- **Worker** (`runtime.worker_recovery`). It computes the attempt of operation i, then waits in its barrier. Behind the
  barrier the operation is *passed*. When its round has ended, the worker leaves what it waits for, asks for the next
  round, joins it, and tells the others how many operations it has passed. The largest number counts for all: a worker
  that has not passed that operation was in its barrier, and keeps its result. All begin the next operation again.
- **Durable.** What an operation changes is set once the operation counts, by each worker for itself: behind the
  barrier, or in the next round. An attempt changes nothing, so a repeated one leaves nothing twice.

`tests/launch/test_survivor_protocol.py` explores all interleavings of small runs, and checks that each operation counts
once on each worker, that the workers of a round are the living ones, and that nobody waits for ever.
"""

from collections.abc import Iterable
from typing import NamedTuple

NO_RANKS: frozenset[int] = frozenset()


class Limits(NamedTuple):
    """What a run must keep.

    Args:
        most_lost: How many lost workers the run tolerates.
        kinds: The workers of each kind, where some are heterogeneous. One of each must be left or have finished.
        hosts: The host of each worker, if lost ones are replaced; else none.
        copies_first: Whether the first of those that are left may be copied.
    """

    most_lost: int
    kinds: tuple[tuple[int, ...], ...] = ()
    hosts: tuple[int, ...] = ()
    copies_first: bool = False


class WorkerMembership(NamedTuple):
    """What the agent knows of the workers. They are named by the ranks with which the run began."""

    living: frozenset[int]
    joined: frozenset[int] = NO_RANKS
    ready: frozenset[int] = NO_RANKS
    """Those that have left their round and ask for the next."""
    complete: frozenset[int] = NO_RANKS
    """Those of them that have all states."""
    replacing: frozenset[tuple[int, int]] = frozenset()
    """Lost workers that are being replaced, each with the one that is copied."""
    progress: int = 0
    """How many operations of the script have counted, as far as the workers have told."""
    replaced_at: int = -1
    """The progress at the last replacement."""
    lost: frozenset[int] = NO_RANKS
    """Those without which the others continue."""
    finished: frozenset[int] = NO_RANKS
    """Those that have ended by themselves with exit code 0."""
    interrupted: frozenset[int] = NO_RANKS
    """Those that a lost connection has ended. The death of its peer may be reported later."""
    round: int = 0
    has_ended: bool = False
    """Whether the last round has ended."""
    has_failed: bool = False
    """Whether a worker has failed by itself, or could not be lost, so that the run ends."""


class Joined(NamedTuple):
    """A worker is in a round with the others."""

    rank: int


class Asked(NamedTuple):
    """A worker asks for the next round. `last_round` is the one that it was in, or could not join."""

    rank: int
    last_round: int
    progress: int = 0
    """How many operations of the script it has passed."""
    is_complete: bool = False
    """Whether it has all states."""


class Replaced(NamedTuple):
    """A worker has forked a process for a lost one, or has not."""

    lost: int
    is_made: bool = True


class Failed(NamedTuple):
    """A worker has raised an exception or left with an exit code; `is_secondary` if it only lost a connection.

    NO_RANK stands for another process that the workers need.
    """

    rank: int
    is_secondary: bool = False


class Ended(NamedTuple):
    """The process of a worker has ended by itself."""

    rank: int
    exit_code: int


class Killed(NamedTuple):
    """Signals have ended workers, or their host is lost."""

    ranks: frozenset[int]


class StartRound(NamedTuple):
    """Tell the members of a round that it starts."""

    number: int
    members: tuple[int, ...]


class EndRound(NamedTuple):
    """Tell workers that a round has ended."""

    number: int
    members: frozenset[int]


class Replace(NamedTuple):
    """Tell a worker to fork a process that takes the place of a lost one."""

    lost: int
    members: tuple[int, ...]
    """The worker that is told."""


Event = Joined | Asked | Replaced | Failed | Ended | Killed
Action = StartRound | EndRound | Replace


def begin(count: int) -> WorkerMembership:
    """Return the membership of a run that begins with so many workers."""
    return WorkerMembership(living=frozenset(range(count)))


def transition(before: WorkerMembership, event: Event, limits: Limits) -> tuple[WorkerMembership, list[Action]]:
    """Return what the agent knows after an event, and what it tells the workers, in this order."""
    state, actions = before, list[Action]()
    if isinstance(event, Joined):
        state = state._replace(joined=state.joined | {event.rank})
    elif isinstance(event, Asked):
        state = _end_replacement(state, event.rank, is_made=True)
        if event.rank in state.living:
            state, actions = _ask(state, event)
    elif isinstance(event, Replaced):
        state = _end_replacement(state, event.lost, is_made=event.is_made)
    elif isinstance(event, Failed) and event.is_secondary:
        state = state._replace(interrupted=state.interrupted | {event.rank})
    elif isinstance(event, Failed) and event.rank not in state.interrupted:
        state = state._replace(has_failed=True)
    elif isinstance(event, Ended) and event.rank in state.living:
        done = frozenset({event.rank})
        state = _without(state, done)
        if event.exit_code == 0:
            state = state._replace(finished=state.finished | done)
        else:
            state = state._replace(has_failed=True)
    elif isinstance(event, Killed) and can_lose(state, event.ranks, limits):
        state, actions = _end_round(_without(state, event.ranks)._replace(lost=state.lost | event.ranks))
    elif isinstance(event, Killed):
        state = _without(state, event.ranks)._replace(has_failed=True)
    if state.ready and state.ready >= state.living and not state.has_failed and not state.replacing:
        orders = _choose_copies(state, limits)
        actions += orders
        if orders:
            replacing = frozenset((order.lost, order.members[0]) for order in orders)
            state = state._replace(replacing=replacing, replaced_at=state.progress)
        else:
            state = state._replace(round=state.round + 1, ready=NO_RANKS, complete=NO_RANKS, has_ended=False)
            actions.append(StartRound(state.round, tuple(sorted(state.living))))
    return state, actions


def _ask(state: WorkerMembership, event: Asked) -> tuple[WorkerMembership, list[Action]]:
    own = frozenset({event.rank})
    state = state._replace(
        ready=state.ready | own,
        complete=state.complete | own if event.is_complete else state.complete - own,
        progress=max(state.progress, event.progress),
    )
    return _end_round(state) if event.last_round == state.round > 0 else (state, [])  # it could not join the others


def _choose_copies(state: WorkerMembership, limits: Limits) -> list[Replace]:
    """Return which workers are copied in the place of lost ones."""
    if not limits.hosts or state.progress <= state.replaced_at:
        return []
    able = state.complete if limits.copies_first else state.complete - {min(state.living)}
    found = ((lost, [each for each in able if limits.hosts[each] == limits.hosts[lost]]) for lost in sorted(state.lost))
    return [Replace(lost, (max(ranks),)) for lost, ranks in found if ranks]


def _end_replacement(state: WorkerMembership, lost: int, *, is_made: bool) -> WorkerMembership:
    """Return the state after a worker was copied, or could not be. The news may come twice."""
    known = frozenset(each for each in state.replacing if each[0] == lost)
    if not known:
        return state
    state = state._replace(replacing=state.replacing - known)
    return state._replace(living=state.living | {lost}, lost=state.lost - {lost}) if is_made else state


def can_lose(state: WorkerMembership, ranks: Iterable[int], limits: Limits) -> bool:
    """Return whether the others can continue without workers that have ended."""
    lost = frozenset(ranks)
    living = state.living - lost
    has_kinds = all(map((living | state.finished).intersection, limits.kinds))
    is_allowed = len(state.lost) + len(lost) <= limits.most_lost and has_kinds
    return state.joined >= living and bool(living) and is_allowed and not state.has_failed


def _without(state: WorkerMembership, ranks: frozenset[int]) -> WorkerMembership:
    replacing = frozenset(each for each in state.replacing if each[1] not in ranks)
    return state._replace(
        living=state.living - ranks, ready=state.ready - ranks, complete=state.complete - ranks, replacing=replacing
    )


def _end_round(state: WorkerMembership) -> tuple[WorkerMembership, list[Action]]:
    if state.has_ended:
        return state, []
    return state._replace(has_ended=True), [EndRound(state.round, state.living)]
