"""The membership of an elastic job: which workers are in which round, from events to actions."""

import random
from collections.abc import Iterable

import pytest

from rankless.config.run_config import Elastic
from rankless.launch.recovery.membership import (
    JOIN_TIMEOUT_SECONDS,
    Action,
    JobMembership,
    MessageAction,
    StartAction,
    WorkerState,
)
from rankless.records.elastic_driver_protocol import (
    HostsChanged,
    RoundEnded,
    RoundStarted,
    WorkerDismissed,
    WorkerReady,
)


def make_membership(
    slots: dict[str, int], *, first: int = 2, may_change: bool = True, **settings: object
) -> JobMembership:
    elastic = Elastic(**({"min_workers": 1, "elastic_timeout_seconds": 60.0} | settings))
    membership = JobMembership(elastic, first_workers=first)
    membership.set_hosts(slots, may_change=may_change)
    return membership


def started_workers(actions: Iterable[Action]) -> list[int]:
    return [action.worker.number for action in actions if isinstance(action, StartAction)]


def sent_messages(actions: Iterable[Action], kind: type) -> dict[int, object]:
    return {
        action.worker.number: action.message
        for action in actions
        if isinstance(action, MessageAction) and isinstance(action.message, kind)
    }


def start_round(membership: JobMembership, now: float = 0.0) -> dict[int, RoundStarted]:
    """Start a round of all ready workers, sync them, and return the message to each."""
    starts = sent_messages(membership.decide(now), RoundStarted)
    assert next(iter(starts.values())).assignment.rank == 0
    for number in starts:
        membership.mark_synced(number, membership.round_number)
    return starts


def mark_ready(membership: JobMembership, *numbers: int, now: float = 0.0, has_state: bool = False) -> None:
    for number in numbers:
        membership.mark_ready(
            number, WorkerReady(last_round=membership.workers[number].last_round, has_state=has_state), now
        )


def start_job(slots: dict[str, int], **settings: object) -> JobMembership:
    """Return a job in its first round."""
    membership = make_membership(slots, **settings)
    numbers = started_workers(membership.decide(0.0))
    mark_ready(membership, *numbers)
    assert set(start_round(membership)) == set(numbers)
    return membership


def workers_by_rank(starts: dict[int, RoundStarted]) -> list[int]:
    return sorted(starts, key=lambda number: starts[number].assignment.rank)


def test_a_worker_missing_from_the_first_round_is_named_and_fails_the_job():
    membership = make_membership({"a": 2})
    assert started_workers(membership.decide(0.0)) == [0, 1]
    mark_ready(membership, 0)
    assert membership.decide(599.0) == []
    assert membership.describe_waiting() == (0.0, "round 1 waits for worker 1 (a) to call hvd.init")
    assert membership.failure is None
    membership.decide(601.0)
    assert membership.failure is not None
    assert membership.failure.headline == "round 1 did not start in time; it waited for worker 1 (a) to call hvd.init"


def test_missing_hosts_are_named():
    membership = make_membership({"a": 1}, first=3)
    membership.decide(0.0)
    mark_ready(membership, 0)
    assert membership.describe_waiting() == (0.0, "round 1 waits for hosts with slots for 2 more workers")
    assert start_job({"a": 2}).describe_waiting() is None


def test_a_round_starts_for_all_its_members_when_all_are_ready():
    membership = make_membership({"a": 2, "b": 1})
    assert started_workers(membership.decide(0.0)) == [0, 1, 2]
    mark_ready(membership, 0, 1)
    assert membership.decide(1.0) == []
    mark_ready(membership, 2)
    messages = sent_messages(membership.decide(1.0), RoundStarted)
    assert {number: message.assignment.rank for number, message in messages.items()} == {0: 0, 1: 1, 2: 2}
    assert messages[2].assignment.cross_rank == 1
    assert membership.decide(1.0) == []


def test_a_dead_worker_ends_the_round_and_gets_a_replacement():
    membership = start_job({"a": 3})
    membership.remove_failed(1, 5.0, is_own=False)
    actions = membership.decide(5.0)
    assert set(sent_messages(actions, RoundEnded)) == {0, 2}
    assert started_workers(actions) == [3]
    mark_ready(membership, 0, 2, now=5.1)
    assert sent_messages(membership.decide(5.2), RoundStarted) == {}  # the replacement is starting
    mark_ready(membership, 3, now=5.5)
    starts = start_round(membership, 5.5)
    assert workers_by_rank(starts) == [0, 2, 3]
    assert all(message.must_sync for message in starts.values())


def test_a_survivor_becomes_rank_0_when_rank_0_dies():
    membership = start_job({"a": 1, "b": 2})
    membership.remove_failed(0, 5.0, is_own=False)
    assert started_workers(membership.decide(5.0)) == [3]
    mark_ready(membership, 1, 2, 3, now=5.0)
    assert workers_by_rank(start_round(membership, 5.0)) == [1, 2, 3]


def test_the_worker_with_the_latest_state_is_rank_0_despite_a_later_round_of_another():
    membership = start_job({"a": 2})
    membership.remove_failed(1, 5.0, is_own=False)
    assert started_workers(membership.decide(5.0)) == [2]
    mark_ready(membership, 0, 2, now=5.0)
    membership.decide(5.0)
    # Worker 2 has been in round 2, but the round ended before it had the state.
    mark_ready(membership, 2, 0, now=6.0)
    assert workers_by_rank(start_round(membership, 6.0)) == [0, 2]


def test_a_slow_replacement_joins_a_later_round_and_is_announced_when_ready():
    membership = start_job({"a": 2})
    membership.remove_failed(1, 5.0, is_own=False)
    membership.decide(5.0)
    mark_ready(membership, 0, now=5.0)
    assert sent_messages(membership.decide(5.0 + JOIN_TIMEOUT_SECONDS / 2), RoundStarted) == {}
    assert workers_by_rank(start_round(membership, 6.0 + JOIN_TIMEOUT_SECONDS)) == [0]
    assert membership.decide(60.0) == []
    mark_ready(membership, 2, now=61.0)
    changes = sent_messages(membership.decide(61.0), HostsChanged)
    assert changes == {0: HostsChanged(round=2, removed=False, added=True)}
    assert membership.decide(62.0) == []  # announced once
    mark_ready(membership, 0, now=63.0)
    assert workers_by_rank(start_round(membership, 63.0)) == [0, 2]


def test_the_workers_of_a_new_host_are_announced_when_all_are_ready():
    membership = start_job({"a": 1}, first=1)
    membership.set_hosts({"a": 1, "b": 2}, may_change=True)
    assert started_workers(membership.decide(5.0)) == [1, 2]
    mark_ready(membership, 1, now=6.0)
    assert membership.decide(6.0) == []
    mark_ready(membership, 2, now=7.0)
    assert set(sent_messages(membership.decide(7.0), HostsChanged)) == {0}


def test_workers_of_a_removed_host_are_dismissed_after_they_left_the_round():
    membership = start_job({"a": 1, "b": 2})
    membership.set_hosts({"a": 1}, may_change=True)
    changes = sent_messages(membership.decide(5.0), HostsChanged)
    assert changes == dict.fromkeys((0, 1, 2), HostsChanged(round=1, removed=True, added=False))
    mark_ready(membership, 1, now=6.0, has_state=True)
    assert set(sent_messages(membership.decide(6.0), WorkerDismissed)) == {1}
    mark_ready(membership, 0, 2, now=6.0, has_state=True)
    actions = membership.decide(6.0)
    assert set(sent_messages(actions, WorkerDismissed)) == {2}
    assert [
        (message.assignment.size, message.must_sync) for message in sent_messages(actions, RoundStarted).values()
    ] == [(1, False)]
    membership.remove_finished(1)
    assert not membership.is_finishing  # a dismissed worker does not end the training


def test_all_members_sync_if_a_worker_joined_while_others_left():
    # Horovod's issue 3494: workers that saw others leave skipped the broadcast, and new workers waited for it.
    membership = start_job({"a": 1, "b": 1}, min_workers=2)
    membership.set_hosts({"a": 1}, may_change=True)
    membership.decide(5.0)
    mark_ready(membership, 0, 1, now=6.0, has_state=True)
    assert set(sent_messages(membership.decide(6.0), WorkerDismissed)) == {1}
    assert membership.decide(20.0) == []  # too few workers
    membership.set_hosts({"a": 1, "c": 1}, may_change=True)
    assert started_workers(membership.decide(21.0)) == [2]
    mark_ready(membership, 2, now=22.0)
    starts = start_round(membership, 22.0)
    assert {number: message.must_sync for number, message in starts.items()} == {0: True, 2: True}


def test_all_members_sync_if_a_survivor_had_to_restore():
    membership = start_job({"a": 2, "b": 1})
    membership.set_hosts({"a": 2}, may_change=True)
    membership.decide(5.0)
    mark_ready(membership, 0, 2, now=6.0, has_state=True)
    mark_ready(membership, 1, now=6.0, has_state=False)
    assert [message.must_sync for message in sent_messages(membership.decide(6.0), RoundStarted).values()] == [True] * 2


def test_the_last_worker_with_the_state_stays_until_another_has_it():
    membership = start_job({"a": 1}, first=1)
    membership.set_hosts({"b": 1}, may_change=True)
    assert started_workers(membership.decide(5.0)) == [1]
    mark_ready(membership, 0, 1, now=6.0)
    assert workers_by_rank(start_round(membership, 6.0)) == [0, 1]
    assert set(sent_messages(membership.decide(7.0), HostsChanged)) == {0, 1}
    mark_ready(membership, 0, 1, now=8.0)
    actions = membership.decide(8.0)
    assert set(sent_messages(actions, WorkerDismissed)) == {0}
    assert set(sent_messages(actions, RoundStarted)) == {1}


def test_max_workers_limits_the_number_of_workers():
    membership = start_job({"a": 2}, max_workers=3)
    membership.set_hosts({"a": 2, "b": 4}, may_change=True)
    assert started_workers(membership.decide(5.0)) == [2]


def test_too_few_workers_for_too_long_fail_the_job():
    membership = start_job({"a": 1, "b": 1}, min_workers=2)
    membership.remove_failed(1, 5.0, is_own=False)
    membership.set_hosts({"a": 1}, may_change=True)
    mark_ready(membership, 0, now=5.0)
    membership.decide(5.0)
    membership.decide(64.0)
    assert membership.failure is None
    membership.decide(66.0)
    assert membership.failure is not None
    assert "--min-np" in membership.failure.headline
    assert membership.failure.worker == 1


def test_the_job_fails_at_once_if_no_other_host_can_join():
    membership = start_job({"a": 2}, min_workers=2, may_change=False)
    for number in (1, 2, 3):
        membership.remove_failed(number, 5.0, is_own=True)
        membership.decide(5.0)
    assert membership.failure is not None
    assert membership.failure.worker == 3


def test_each_blacklisting_of_a_host_lasts_longer():
    membership = start_job({"a": 1, "b": 1}, cooldown_range_seconds=(10.0, 30.0))
    now, durations = 5.0, []
    while len(durations) < 3:
        number = max(membership.workers)
        duration = membership.remove_failed(number, now, is_own=True)
        if duration is not None:
            durations.append(duration)
            assert started_workers(membership.decide(now + duration - 1)) == []
            now += duration
        assert len(started_workers(membership.decide(now + 1))) == 1
    assert durations == [10.0, 20.0, 30.0]


def test_workers_killed_after_a_sync_do_not_count_against_their_host():
    membership = start_job({"a": 2})
    for step in range(10):
        number = max(membership.workers)
        assert membership.remove_failed(number, 5.0 + step, is_own=False) is None
        membership.decide(5.0 + step)
        mark_ready(membership, *membership.workers, now=5.0 + step)
        start_round(membership, 5.0 + step)
    assert membership.round_number == 11


def test_the_job_fails_when_no_worker_has_the_state():
    membership = start_job({"a": 2})
    membership.remove_failed(0, 5.0, is_own=False)
    membership.decide(5.0)
    membership.remove_failed(1, 5.0, is_own=False)
    assert membership.failure is not None
    assert membership.failure.worker == 1


def test_the_reset_limit_fails_the_job():
    membership = start_job({"a": 2}, reset_limit=1)
    mark_ready(membership, 0, 1, now=5.0)
    start_round(membership, 5.0)
    mark_ready(membership, 0, 1, now=6.0)
    assert sent_messages(membership.decide(6.0), RoundStarted) == {}
    assert membership.failure is not None
    assert "reset limit of 1" in membership.failure.headline


class SimulatedJob:
    """Workers that react to messages in a random order, and die at random moments."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hosts = {"a": 2, "b": 2}
        self.membership = make_membership(dict(self.hosts), max_workers=4)
        self.now = 0.0
        self.starting: set[int] = set()
        self.member_of: dict[int, int] = {}
        self.informed: set[int] = set()
        self.dismissed: list[int] = []

    def advance(self) -> None:
        self.now += 0.1
        for action in self.membership.decide(self.now):
            number = action.worker.number
            if number not in self.membership.workers:
                continue  # it died before the message
            if isinstance(action, StartAction):
                self.starting.add(number)
            elif isinstance(action.message, RoundStarted):
                assert number not in self.member_of, "a round started for a member of another"
                self.member_of[number] = action.message.round
            elif isinstance(action.message, RoundEnded | HostsChanged):
                self.informed.add(number)
            else:
                self.dismissed.append(number)

    def step(self, *, may_fail: bool) -> None:
        events = [self.arrive, self.leave, self.sync, self.finish]
        if may_fail and len(self.holders()) > 1:
            events += [self.die, self.change_hosts]
        self.random.choice(events)()
        self.advance()

    def arrive(self) -> None:
        if self.starting:
            number = self.starting.pop()
            self.membership.mark_ready(number, WorkerReady(), self.now)

    def leave(self) -> None:
        for number in [number for number in self.informed if number in self.member_of]:
            last = self.member_of.pop(number)
            self.informed.discard(number)
            self.membership.mark_ready(
                number, WorkerReady(last_round=last, has_state=self.random.random() < 0.5), self.now
            )

    def sync(self) -> None:
        for number, round in self.member_of.items():
            self.membership.mark_synced(number, round)

    def finish(self) -> None:
        while self.dismissed:
            self.membership.remove_finished(self.dismissed.pop())

    def die(self) -> None:
        number = self.random.choice(list(self.membership.workers))
        if number in self.dismissed or self.holders() == [number]:
            return
        self.membership.remove_failed(number, self.now, is_own=False)
        for numbers in (self.starting, self.informed):
            numbers.discard(number)
        self.member_of.pop(number, None)

    def change_hosts(self) -> None:
        self.hosts[self.random.choice("abc")] = self.random.randint(0, 2)
        if sum(self.hosts.values()) == 0:
            self.hosts["a"] = 2
        self.membership.set_hosts({name: slots for name, slots in self.hosts.items() if slots}, may_change=True)

    def holders(self) -> list[int]:
        return [number for number, worker in self.membership.workers.items() if worker.synced_round]


@pytest.mark.parametrize("seed", range(40))
def test_after_any_events_all_wanted_workers_are_in_one_round(seed: int):
    simulated = SimulatedJob(seed)
    for _ in range(400):
        simulated.step(may_fail=True)
        assert simulated.membership.failure is None
        assert not simulated.membership.is_finishing
    simulated.membership.blacklist = type(simulated.membership.blacklist)(None)  # the deaths have blacklisted hosts
    for _ in range(400):
        simulated.step(may_fail=False)
    membership = simulated.membership
    wanted = {number for number, worker in membership.workers.items() if worker.is_wanted}
    assert len(wanted) == min(4, sum(simulated.hosts.values()))
    assert set(membership.workers) == wanted
    assert {worker.state for worker in membership.workers.values()} == {WorkerState.IN_ROUND}
    assert {worker.last_round for worker in membership.workers.values()} == {membership.round_number}
