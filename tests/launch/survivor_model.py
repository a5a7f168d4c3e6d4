"""A model of workers that follow the protocol of survivors, and an exploration of all orders of its steps.

See Note [protocol of survivors] in `rankless.launch.recovery.survivor_membership`. The agent is the real transition
function. A worker is a tuple; messages travel in order on each channel, and arrive at any time.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rankless.launch.recovery.survivor_membership import (
    Asked,
    Ended,
    EndRound,
    Event,
    Joined,
    Killed,
    Limits,
    Replace,
    Replaced,
    StartRound,
    WorkerMembership,
    begin,
    transition,
)


class Worker(NamedTuple):
    """A worker. Its phases: attempt, barrier, asking, joining, done, dead."""

    phase: str = "attempt"
    passed: int = 0
    """How many operations count for it."""
    finished: int = 0
    """The last operation whose attempt it has finished: it has the result until the next one begins."""
    applied: tuple[int, ...] = ()
    """The operations whose changes it has set, in their order."""
    round: int = 0
    round_ended: int = -1
    """The last round of which it knows that it has ended."""
    lacks_states: bool = False
    """Whether the states of a lost worker must be taken over, before it can be copied."""
    asks_left: int = 0
    """How often the workers may still ask for a replacement, after a loss."""
    ask_at: int = 0
    """How many operations must have counted before they do."""
    has_asked: bool = False
    whole_at: int = -1
    """How many had counted when all workers had all states."""


class State(NamedTuple):
    """All workers, the agent, and what is on its way."""

    workers: tuple[Worker, ...]
    agent: WorkerMembership
    to_agent: tuple[tuple[Event, ...], ...]
    """The messages of each worker that have not arrived."""
    to_worker: tuple[tuple[object, ...], ...]
    ends: tuple[Event, ...] = ()
    """What the system reports of ended processes, in any order with messages."""
    arrived: frozenset[tuple[int, int, int]] = frozenset()
    """Round, operation and rank of each arrival at a barrier. One that has died since has arrived, too."""
    joins: frozenset[tuple[int, int, int, int]] = frozenset()
    """Round, rank, what the worker has passed, and how often it may ask, of each that has joined."""
    kills: int = 0
    members: tuple[tuple[int, ...], ...] = ()
    """The members of each round."""


class Run(NamedTuple):
    """What is explored.

    Args:
        hosts: The host of each worker.
        operations: How many operations the script has.
        kills: How many failures there are: of a worker, of a whole host other than the first, or of a connection
            with which a worker would join a round.
        limits: What the run tolerates.
        divides_states: Whether workers have parts of the states, so that they take over those of a lost one before
            they ask for a replacement.
        may_refuse: Whether a worker may fail to make a replacement.
    """

    hosts: tuple[int, ...]
    operations: int
    kills: int
    limits: Limits
    divides_states: bool = False
    may_refuse: bool = True


def start(run: Run) -> State:
    count = len(run.hosts)
    # All have joined round 0, which the agent hears first.
    agent = begin(count)
    for rank in range(count):
        agent, _ = transition(agent, Joined(rank), run.limits)
    return State(
        workers=(Worker(),) * count,
        agent=agent,
        to_agent=((),) * count,
        to_worker=((),) * count,
        members=(tuple(range(count)),),
    )


def put(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def change(state: State, rank: int, worker: Worker, *messages: Event) -> State:
    state = state._replace(workers=put(state.workers, rank, worker))
    return state._replace(to_agent=put(state.to_agent, rank, (*state.to_agent[rank], *messages))) if messages else state


def hear(state: State, event: Event, limits: Limits) -> State:
    agent, actions = transition(state.agent, event, limits)
    state = state._replace(agent=agent)
    for action in actions:
        if isinstance(action, StartRound):
            assert set(action.members) == set(agent.living), "a round has all living workers"
            state = state._replace(members=(*state.members, action.members))
        for rank in action.members:
            state = state._replace(to_worker=put(state.to_worker, rank, (*state.to_worker[rank], action)))
    return state


def next_states(state: State, run: Run) -> Iterator[State]:
    yield from _agent_steps(state, run)
    for rank, worker in enumerate(state.workers):
        yield from _worker_steps(state, run, rank, worker)
    if state.kills < run.kills:
        yield from _kills(state, run)


def _agent_steps(state: State, run: Run) -> Iterator[State]:
    for rank, waiting in enumerate(state.to_agent):
        if waiting:
            yield hear(state._replace(to_agent=put(state.to_agent, rank, waiting[1:])), waiting[0], run.limits)
    for place, event in enumerate(state.ends):
        rest = state._replace(ends=state.ends[:place] + state.ends[place + 1 :])
        # Before an end the agent reads what has arrived on the channels, so all of it here.
        for rank, waiting in enumerate(rest.to_agent):
            for message in waiting:
                rest = hear(rest, message, run.limits)
            rest = rest._replace(to_agent=put(rest.to_agent, rank, ()))
        yield hear(rest, event, run.limits)


def _worker_steps(state: State, run: Run, rank: int, worker: Worker) -> Iterator[State]:
    if worker.phase == "dead":
        return
    waiting = state.to_worker[rank]
    if waiting:
        rest = state._replace(to_worker=put(state.to_worker, rank, waiting[1:]))
        message = waiting[0]
        if isinstance(message, EndRound):
            yield change(rest, rank, worker._replace(round_ended=max(worker.round_ended, message.number)))
        elif isinstance(message, Replace):
            assert worker.phase == "asking", "a worker is copied while it waits for a round"
            yield _copy(rest, rank, message.lost)
            if run.may_refuse:
                yield change(rest, rank, worker, Replaced(message.lost, is_made=False))
        elif worker.phase == "asking":
            yield change(rest, rank, worker._replace(phase="joining", round=message.number))
    number, members = worker.passed + 1, state.members[worker.round]
    has_ended = worker.round_ended >= worker.round
    if worker.phase in ("attempt", "barrier", "joining") and has_ended:
        lacks = worker.lacks_states or (run.divides_states and worker.phase != "joining")
        asking = worker._replace(phase="asking", lacks_states=lacks)
        if run.limits.hosts and not worker.lacks_states and worker.phase != "joining":
            asking = asking._replace(asks_left=2)
        yield change(state, rank, asking, Asked(rank, worker.round, worker.passed, is_complete=not lacks))
    elif worker.phase == "attempt" and worker.asks_left and worker.passed >= worker.ask_at:
        # States have been taken over. All ask for another round, in which lost workers are replaced.
        is_divided = run.divides_states and not worker.lacks_states and worker.passed > worker.whole_at
        asking = worker._replace(phase="asking", lacks_states=is_divided, has_asked=not is_divided)
        if not is_divided:
            asking = asking._replace(asks_left=worker.asks_left - 1, whole_at=worker.passed)
        yield change(state, rank, asking, Asked(rank, worker.round, worker.passed, is_complete=not is_divided))
    elif worker.phase == "attempt" and number > run.operations:
        ended = change(state, rank, worker._replace(phase="done"))
        yield ended._replace(ends=(*ended.ends, Ended(rank, 0)))
    elif worker.phase == "attempt" and not has_ended:
        # The collectives of an attempt need all members. Where one is missing the worker waits as in the barrier.
        arrived = state.arrived | {(worker.round, number, rank)}
        yield change(state._replace(arrived=arrived), rank, worker._replace(phase="barrier", finished=number))
    elif worker.phase == "barrier" and all((worker.round, number, member) in state.arrived for member in members):
        yield change(state, rank, worker._replace(phase="attempt", passed=number, applied=(*worker.applied, number)))
    elif worker.phase == "joining":
        yield from _join(state, run, rank, worker)


def _copy(state: State, rank: int, lost: int) -> State:
    """Fork a process from a worker that takes the place of a lost one. It has a channel of its own."""
    assert state.workers[lost].phase == "dead", "only a worker that has ended is replaced"
    worker = state.workers[rank]
    state = state._replace(to_agent=put(state.to_agent, lost, ()), to_worker=put(state.to_worker, lost, ()))
    state = change(state, lost, worker, Asked(lost, 0, worker.passed, is_complete=True))
    return change(state, rank, worker, Replaced(lost))


def _join(state: State, run: Run, rank: int, worker: Worker) -> Iterator[State]:
    """Tell the others of a round what counts here; then hear what counts for all, once all have known it."""
    members = state.members[worker.round]
    own = (worker.round, rank, worker.passed, worker.asks_left)
    if own not in state.joins:
        yield state._replace(joins=state.joins | {own})
        return
    known = [(passed, asks) for number, _, passed, asks in state.joins if number == worker.round]
    if len(known) < len(members):
        return
    counted, asks_left = max(passed for passed, _ in known), min(asks for _, asks in known)
    if asks_left < worker.asks_left:  # another one has asked, so all have taken over the states
        worker = worker._replace(lacks_states=False, has_asked=True, whole_at=counted)
    ask_at = counted + (worker.has_asked or not run.divides_states)
    asks_left = asks_left if len(members) < len(state.workers) else 0
    worker = worker._replace(asks_left=asks_left, ask_at=ask_at, has_asked=False)
    assert counted - worker.passed <= 1, "nobody is more than one operation ahead"
    applied = worker.applied
    if counted > worker.passed:
        assert worker.finished == counted, "a worker that has not passed what counts was in its barrier"
        applied = (*applied, counted)
    yield change(state, rank, worker._replace(phase="attempt", passed=counted, applied=applied), Joined(rank))


def _kills(state: State, run: Run) -> Iterator[State]:
    running = [rank for rank, each in enumerate(state.workers) if each.phase not in ("dead", "done")]
    groups = [(rank,) for rank in running]
    for host in set(run.hosts) - {run.hosts[0]}:
        group = tuple(rank for rank in running if run.hosts[rank] == host)
        if len(group) > 1:
            groups.append(group)
    for group in groups:
        killed = state
        for rank in group:
            killed = change(killed, rank, killed.workers[rank]._replace(phase="dead"))
        yield killed._replace(ends=(*killed.ends, Killed(frozenset(group))), kills=state.kills + 1)
    for rank, each in enumerate(state.workers):
        if each.phase == "joining":
            failed = change(state, rank, each._replace(phase="asking"), Asked(rank, each.round, each.passed))
            yield failed._replace(kills=state.kills + 1)


def check(state: State, run: Run, *, is_last: bool) -> None:
    for worker in state.workers:
        assert worker.applied == tuple(range(1, worker.passed + 1)), "each operation counts once, in their order"
    if not is_last:
        return
    left = [each for each in state.workers if each.phase != "dead"]
    if state.agent.has_failed:
        assert len(state.agent.lost) + 1 > run.limits.most_lost or not left or _ended_early(state), "it could continue"
        return
    assert all(each.phase == "done" for each in left), "nobody waits for ever"
    assert all(each.passed == run.operations for each in left)


def _ended_early(state: State) -> bool:
    """Whether all living workers were done when the last one was killed, or a member had not joined the round."""
    return not state.agent.living


def explore(run: Run, on_state: Callable[[State], None] = lambda _state: None) -> int:
    """Check all states that a run can reach. Return their number.

    Of those that it has seen it keeps hashes of 64 bits: with 10 million states one is taken for another one with a
    probability of 3 in a million.
    """
    first = start(run)
    seen, waiting = {hash(first)}, [first]
    while waiting:
        state = waiting.pop()
        following = list(next_states(state, run))
        check(state, run, is_last=not following)
        on_state(state)
        for each in following:
            if hash(each) not in seen:
                seen.add(hash(each))
                waiting.append(each)
    return len(seen)
