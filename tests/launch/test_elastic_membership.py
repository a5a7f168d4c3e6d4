"""Who is in which round of an elastic job: the roll, told what happens, and what it wants done."""

import random
from collections.abc import Iterable

import pytest

from rankless.config.elastic import Elastic
from rankless.launch.elastic.member import Action, Start, Status, Tell
from rankless.launch.elastic.membership import PATIENCE_SECONDS, JobMembership
from rankless.records.elastic_messages import HostsChanged, RoundEnded, RoundStarted, WorkerDismissed, WorkerReady


def made(slots: dict[str, int], *, first: int = 2, may_change: bool = True, **settings: object) -> JobMembership:
    elastic = Elastic(**({"min_workers": 1, "elastic_timeout_seconds": 60.0} | settings))
    roll = JobMembership(elastic, first_workers=first)
    roll.hosts_are(slots, may_change=may_change)
    return roll


def started(actions: Iterable[Action]) -> list[int]:
    return [action.worker.number for action in actions if isinstance(action, Start)]


def told(actions: Iterable[Action], kind: type) -> dict[int, object]:
    return {
        action.worker.number: action.word
        for action in actions
        if isinstance(action, Tell) and isinstance(action.word, kind)
    }


def begin(roll: JobMembership, now: float = 0.0) -> dict[int, RoundStarted]:
    """Begin a round of all who are ready, as they do it, and sync; what each was told."""
    (lead, word), *rest = told(roll.turn(now), RoundStarted).items()
    assert rest == []
    assert (word.assignment.rank, word.port) == (0, None)
    roll.serving(lead, word.round, 4000)
    begins = {lead: word} | told(roll.turn(now), RoundStarted)
    for number in begins:
        roll.synced(number, word.round)
    return begins


def ready(roll: JobMembership, *numbers: int, now: float = 0.0, has_state: bool = False) -> None:
    for number in numbers:
        roll.ready(number, WorkerReady(last_round=roll.workers[number].last_round, has_state=has_state), now)


def running(slots: dict[str, int], **settings: object) -> JobMembership:
    """A job in its first round."""
    roll = made(slots, **settings)
    numbers = started(roll.turn(0.0))
    ready(roll, *numbers)
    assert set(begin(roll)) == set(numbers)
    return roll


def ranks(begins: dict[int, RoundStarted]) -> list[int]:
    return sorted(begins, key=lambda number: begins[number].assignment.rank)


def test_who_does_not_come_to_the_first_round_is_told_and_ends_the_job():
    roll = made({"a": 2})
    assert started(roll.turn(0.0)) == [0, 1]
    ready(roll, 0)
    assert roll.turn(599.0) == []
    assert roll.awaited() == (0.0, "round 1 waits for worker 1 (a) to call hvd.init")
    assert roll.trouble is None
    roll.turn(601.0)
    assert roll.trouble is not None
    assert roll.trouble.headline == "round 1 did not begin in time; awaited: worker 1 (a) to call hvd.init"


def test_hosts_that_are_missing_are_told():
    roll = made({"a": 1}, first=3)
    roll.turn(0.0)
    ready(roll, 0)
    assert roll.awaited() == (0.0, "round 1 waits for hosts with slots for 2 more workers")
    assert running({"a": 2}).awaited() is None


def test_a_round_begins_when_all_are_ready_and_rank_0_serves_before_the_others_are_told():
    roll = made({"a": 2, "b": 1})
    assert started(roll.turn(0.0)) == [0, 1, 2]
    ready(roll, 0, 1)
    assert roll.turn(1.0) == []
    ready(roll, 2)
    (first,) = roll.turn(1.0)
    assert isinstance(first, Tell)
    assert (first.word.port, first.word.assignment.rank) == (None, 0)
    assert roll.turn(1.0) == []
    roll.serving(0, 1, 4000)
    words = told(roll.turn(1.0), RoundStarted)
    assert {number: word.port for number, word in words.items()} == {1: 4000, 2: 4000}
    assert words[2].assignment.cross_rank == 1


def test_the_rest_of_a_round_is_told_and_a_replacement_comes_when_a_worker_dies():
    roll = running({"a": 3})
    roll.failed(1, 5.0, is_own=False)
    actions = roll.turn(5.0)
    assert set(told(actions, RoundEnded)) == {0, 2}
    assert started(actions) == [3]
    ready(roll, 0, 2, now=5.1)
    assert told(roll.turn(5.2), RoundStarted) == {}  # the replacement is on its way
    ready(roll, 3, now=5.5)
    begins = begin(roll, 5.5)
    assert ranks(begins) == [0, 2, 3]
    assert all(word.must_sync for word in begins.values())


def test_the_next_rank_0_is_a_survivor_when_rank_0_dies():
    roll = running({"a": 1, "b": 2})
    roll.failed(0, 5.0, is_own=False)
    assert started(roll.turn(5.0)) == [3]
    ready(roll, 1, 2, 3, now=5.0)
    assert ranks(begin(roll, 5.0)) == [1, 2, 3]


def test_who_has_the_latest_state_leads_though_another_was_in_a_later_round():
    roll = running({"a": 2})
    roll.failed(1, 5.0, is_own=False)
    assert started(roll.turn(5.0)) == [2]
    ready(roll, 0, 2, now=5.0)
    (lead,) = told(roll.turn(5.0), RoundStarted)
    roll.serving(lead, 2, 4000)
    roll.turn(5.0)
    # Worker 2 has been in round 2, but the round ended before it had the state.
    ready(roll, 2, 0, now=6.0)
    assert ranks(begin(roll, 6.0)) == [0, 2]


def test_a_slow_replacement_is_left_for_a_later_round_and_the_members_are_told_once_it_is_there():
    roll = running({"a": 2})
    roll.failed(1, 5.0, is_own=False)
    roll.turn(5.0)
    ready(roll, 0, now=5.0)
    assert told(roll.turn(5.0 + PATIENCE_SECONDS / 2), RoundStarted) == {}
    assert ranks(begin(roll, 6.0 + PATIENCE_SECONDS)) == [0]
    assert roll.turn(60.0) == []
    ready(roll, 2, now=61.0)
    notices = told(roll.turn(61.0), HostsChanged)
    assert notices == {0: HostsChanged(round=2, removed=False, added=True)}
    assert roll.turn(62.0) == []  # told once
    ready(roll, 0, now=63.0)
    assert ranks(begin(roll, 63.0)) == [0, 2]


def test_workers_of_a_new_host_are_awaited_before_the_members_are_told():
    roll = running({"a": 1}, first=1)
    roll.hosts_are({"a": 1, "b": 2}, may_change=True)
    assert started(roll.turn(5.0)) == [1, 2]
    ready(roll, 1, now=6.0)
    assert roll.turn(6.0) == []
    ready(roll, 2, now=7.0)
    assert set(told(roll.turn(7.0), HostsChanged)) == {0}


def test_workers_of_a_host_that_goes_are_dismissed_when_they_have_left_the_round():
    roll = running({"a": 1, "b": 2})
    roll.hosts_are({"a": 1}, may_change=True)
    notices = told(roll.turn(5.0), HostsChanged)
    assert notices == dict.fromkeys((0, 1, 2), HostsChanged(round=1, removed=True, added=False))
    ready(roll, 1, now=6.0, has_state=True)
    assert set(told(roll.turn(6.0), WorkerDismissed)) == {1}
    ready(roll, 0, 2, now=6.0, has_state=True)
    actions = roll.turn(6.0)
    assert set(told(actions, WorkerDismissed)) == {2}
    assert [(word.assignment.size, word.must_sync) for word in told(actions, RoundStarted).values()] == [(1, False)]
    roll.finished(1)
    assert not roll.is_finishing  # it was dismissed: that is not the end of the training


def test_everybody_takes_part_in_sending_the_state_if_somebody_has_come_while_workers_went():
    # Horovod's issue 3494: who had seen workers go left it out, who had come waited for it.
    roll = running({"a": 1, "b": 1}, min_workers=2)
    roll.hosts_are({"a": 1}, may_change=True)
    roll.turn(5.0)
    ready(roll, 0, 1, now=6.0, has_state=True)
    assert set(told(roll.turn(6.0), WorkerDismissed)) == {1}
    assert roll.turn(20.0) == []  # there are too few
    roll.hosts_are({"a": 1, "c": 1}, may_change=True)
    assert started(roll.turn(21.0)) == [2]
    ready(roll, 2, now=22.0)
    begins = begin(roll, 22.0)
    assert {number: word.must_sync for number, word in begins.items()} == {0: True, 2: True}


def test_a_survivor_that_had_to_restore_makes_all_take_part_in_sending_the_state():
    roll = running({"a": 2, "b": 1})
    roll.hosts_are({"a": 2}, may_change=True)
    roll.turn(5.0)
    ready(roll, 0, 2, now=6.0, has_state=True)
    ready(roll, 1, now=6.0, has_state=False)
    assert [word.must_sync for word in told(roll.turn(6.0), RoundStarted).values()] == [True]


def test_the_last_that_has_the_state_stays_until_another_has_it():
    roll = running({"a": 1}, first=1)
    roll.hosts_are({"b": 1}, may_change=True)
    assert started(roll.turn(5.0)) == [1]
    ready(roll, 0, 1, now=6.0)
    assert ranks(begin(roll, 6.0)) == [0, 1]
    assert set(told(roll.turn(7.0), HostsChanged)) == {0, 1}
    ready(roll, 0, 1, now=8.0)
    actions = roll.turn(8.0)
    assert set(told(actions, WorkerDismissed)) == {0}
    assert set(told(actions, RoundStarted)) == {1}


def test_not_more_workers_than_the_most():
    roll = running({"a": 2}, max_workers=3)
    roll.hosts_are({"a": 2, "b": 4}, may_change=True)
    assert started(roll.turn(5.0)) == [2]


def test_too_few_workers_for_too_long_end_the_job():
    roll = running({"a": 1, "b": 1}, min_workers=2)
    roll.failed(1, 5.0, is_own=False)
    roll.hosts_are({"a": 1}, may_change=True)
    ready(roll, 0, now=5.0)
    roll.turn(5.0)
    roll.turn(64.0)
    assert roll.trouble is None
    roll.turn(66.0)
    assert roll.trouble is not None
    assert "--min-np" in roll.trouble.headline
    assert roll.trouble.culprit == 1


def test_the_job_ends_at_once_where_no_other_host_can_come():
    roll = running({"a": 2}, min_workers=2, may_change=False)
    for number in (1, 2, 3):
        roll.failed(number, 5.0, is_own=True)
        roll.turn(5.0)
    assert roll.trouble is not None
    assert roll.trouble.culprit == 3


def test_a_host_whose_workers_fail_again_and_again_rests_for_longer_each_time():
    roll = running({"a": 1, "b": 1}, cooldown_range_seconds=(10.0, 30.0))
    now, rests = 5.0, []
    while len(rests) < 3:
        number = max(roll.workers)
        rest = roll.failed(number, now, is_own=True)
        if rest is not None:
            rests.append(rest)
            assert started(roll.turn(now + rest - 1)) == []
            now += rest
        assert len(started(roll.turn(now + 1))) == 1
    assert rests == [10.0, 20.0, 30.0]


def test_workers_that_are_killed_after_they_took_part_do_not_count_against_their_host():
    roll = running({"a": 2})
    for turn in range(10):
        number = max(roll.workers)
        assert roll.failed(number, 5.0 + turn, is_own=False) is None
        roll.turn(5.0 + turn)
        ready(roll, *roll.workers, now=5.0 + turn)
        begin(roll, 5.0 + turn)
    assert roll.round == 11


def test_the_job_ends_when_nobody_is_left_who_has_the_state():
    roll = running({"a": 2})
    roll.failed(0, 5.0, is_own=False)
    roll.turn(5.0)
    roll.failed(1, 5.0, is_own=False)
    assert roll.trouble is not None
    assert roll.trouble.culprit == 1


def test_the_reset_limit():
    roll = running({"a": 2}, reset_limit=1)
    ready(roll, 0, 1, now=5.0)
    begin(roll, 5.0)
    ready(roll, 0, 1, now=6.0)
    assert told(roll.turn(6.0), RoundStarted) == {}
    assert roll.trouble is not None
    assert "reset limit of 1" in roll.trouble.headline


def test_once_a_worker_has_finished_nobody_is_started_and_who_lost_it_may_finish_alone():
    roll = running({"a": 3}, min_workers=2)
    roll.failed(1, 5.0, is_own=False)
    assert started(roll.turn(5.0)) == [3]
    roll.finished(0)
    ready(roll, 2, 3, now=5.0)
    actions = roll.turn(5.0)
    assert started(actions) == []
    assert set(told(actions, WorkerDismissed)) == {3}
    assert set(told(actions, RoundStarted)) == {2}
    roll.finished(2)
    roll.finished(3)
    assert roll.is_finishing
    assert roll.workers == {}


class Simulated:
    """Workers that do what they are told, in any order, and die and lose each other at any moment."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hosts = {"a": 2, "b": 2}
        self.roll = made(dict(self.hosts), max_workers=4)
        self.now = 0.0
        self.starting: set[int] = set()
        self.member_of: dict[int, int] = {}
        self.noticed: set[int] = set()
        self.leads: list[tuple[int, RoundStarted]] = []
        self.ended: list[int] = []

    def turn(self) -> None:
        self.now += 0.1
        for action in self.roll.turn(self.now):
            number = action.worker.number
            if number not in self.roll.workers:
                continue  # it died before it could hear
            if isinstance(action, Start):
                self.starting.add(number)
            elif isinstance(action.word, RoundStarted):
                assert number not in self.member_of, "told of a round while in another"
                self.member_of[number] = action.word.round
                if action.word.port is None:
                    self.leads.append((number, action.word))
            elif isinstance(action.word, RoundEnded | HostsChanged):
                self.noticed.add(number)
            else:
                self.ended.append(number)

    def step(self, *, may_fail: bool) -> None:
        happenings = [self.come, self.serve, self.leave, self.sync, self.end]
        if may_fail and len(self.holders()) > 1:
            happenings += [self.die, self.change_hosts]
        self.random.choice(happenings)()
        self.turn()

    def come(self) -> None:
        if self.starting:
            number = self.starting.pop()
            self.roll.ready(number, WorkerReady(), self.now)

    def serve(self) -> None:
        if self.leads:
            number, word = self.leads.pop()
            if number in self.roll.workers:
                self.roll.serving(number, word.round, 4000)

    def leave(self) -> None:
        for number in [number for number in self.noticed if number in self.member_of]:
            last = self.member_of.pop(number)
            self.noticed.discard(number)
            self.roll.ready(number, WorkerReady(last_round=last, has_state=self.random.random() < 0.5), self.now)

    def sync(self) -> None:
        for number, round in self.member_of.items():
            self.roll.synced(number, round)

    def end(self) -> None:
        while self.ended:
            self.roll.finished(self.ended.pop())

    def die(self) -> None:
        number = self.random.choice(list(self.roll.workers))
        if number in self.ended or self.holders() == [number]:
            return
        self.roll.failed(number, self.now, is_own=False)
        for known in (self.starting, self.noticed):
            known.discard(number)
        self.member_of.pop(number, None)

    def change_hosts(self) -> None:
        self.hosts[self.random.choice("abc")] = self.random.randint(0, 2)
        if sum(self.hosts.values()) == 0:
            self.hosts["a"] = 2
        self.roll.hosts_are({name: slots for name, slots in self.hosts.items() if slots}, may_change=True)

    def holders(self) -> list[int]:
        return [number for number, worker in self.roll.workers.items() if worker.synced_round]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_all_workers_that_are_wanted_come_into_one_round(seed: int):
    simulated = Simulated(seed)
    for _ in range(400):
        simulated.step(may_fail=True)
        assert simulated.roll.trouble is None
        assert not simulated.roll.is_finishing
    simulated.roll.blacklist = type(simulated.roll.blacklist)(None)  # hosts that the deaths have listed
    for _ in range(400):
        simulated.step(may_fail=False)
    roll = simulated.roll
    wanted = {number for number, worker in roll.workers.items() if worker.is_wanted}
    assert len(wanted) == min(4, sum(simulated.hosts.values()))
    assert set(roll.workers) == wanted
    assert {worker.status for worker in roll.workers.values()} == {Status.IN_ROUND}
    assert {worker.last_round for worker in roll.workers.values()} == {roll.round}
