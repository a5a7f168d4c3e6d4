"""A round of an elastic job that stands still: when it is spoken of, and who is ended."""

from rankless.launch.elastic.round_watchdog import Report, RoundWatchdog
from rankless.records.elastic_messages import RankAssignment
from rankless.records.events import RankState, RankStatus

HOSTS = {3: "a", 5: "a", 8: "b"}
SEATS = {
    number: RankAssignment(rank=rank, size=3, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
    for rank, number in enumerate(HOSTS)
}


def where(number: int, state: RankState, still: float = 10.0) -> RankStatus:
    doing = "all_reduce" if state == "waits" else "sleeps"
    return RankStatus(
        rank=number, time_ns=0, state=state, still_seconds=still, doing=doing, line="train.py:9", text="f() at x.py:1"
    )


def turn(standstill: RoundWatchdog, now: float, *, round: int = 1) -> Report | None:
    return standstill.turn(round, SEATS, HOSTS, now)


def with_a_sleeper(timeout: float | None) -> RoundWatchdog:
    standstill = RoundWatchdog(timeout)
    assert turn(standstill, 0.0) is None
    standstill.take(where(3, "waits"), 10.0)
    standstill.take(where(8, "waits"), 10.0)
    standstill.take(where(5, "blocked"), 12.0)
    return standstill


def test_who_holds_a_round_up_is_named_and_ended_only_after_many_minutes():
    standstill = with_a_sleeper(None)
    assert turn(standstill, 31.0) is None
    report = turn(standstill, 32.0)
    assert report is not None
    assert report.text.splitlines() == [
        "round 1 has stood still for 30 s: ranks 0, 2 wait in all_reduce at train.py:9",
        "  rank 1, worker 5 on a: it is in f() at x.py:1 (sleeps, 0 % CPU)",
    ]
    assert report.culprits == {}
    assert turn(standstill, 60.0) is None
    assert turn(standstill, 62.0) is not None  # again after twice the time
    report = turn(standstill, 603.0)
    assert report is not None
    assert report.culprits == {5: "did not come while ranks 0, 2 wait in all_reduce at train.py:9 for 601 s"}


def test_with_a_timeout_of_the_users_it_is_ended_then():
    standstill = with_a_sleeper(45.0)
    first, second = turn(standstill, 33.0), turn(standstill, 48.0)
    assert first is not None
    assert first.culprits == {}
    assert second is not None
    assert set(second.culprits) == {5}


def test_as_long_as_one_moves_the_round_does():
    standstill = with_a_sleeper(20.0)
    standstill.take(where(8, "moves"), 15.0)
    assert turn(standstill, 100.0) is None
    standstill.take(where(8, "waits"), 110.0)
    report = turn(standstill, 125.0)
    assert report is not None
    assert "has stood still for 25 s" in report.text


def test_if_nobody_waits_for_another_nobody_is_ended():
    standstill = RoundWatchdog(20.0)
    assert turn(standstill, 0.0) is None
    for number in SEATS:
        standstill.take(where(number, "blocked"), 10.0)
    report = turn(standstill, 400.0)
    assert report is not None
    assert report.culprits == {}


def test_a_new_round_begins_anew():
    standstill = with_a_sleeper(20.0)
    assert turn(standstill, 40.0) is not None
    assert turn(standstill, 50.0, round=2) is None
    assert turn(standstill, 500.0, round=2) is None  # all that is known is how they waited for it
    for number in SEATS:
        standstill.take(where(number, "waits"), 520.0)
    assert turn(standstill, 530.0, round=2) is not None


def test_who_does_not_end_when_others_have_is_spoken_of_and_ended_only_if_the_user_has_said_when():
    for timeout, wanted in ((None, {}), (45.0, {5: "did not come to its end for 45 s, and others have"})):
        standstill = RoundWatchdog(timeout)
        assert turn(standstill, 0.0) is None
        standstill.finished(3, 5.0)
        standstill.finished(8, 6.0)
        assert turn(standstill, 9.0) is None
        standstill.take(where(5, "blocked"), 12.0)
        report = turn(standstill, 32.0)
        assert report is not None
        assert report.text.splitlines() == [
            "round 1 has stood still for 30 s: ranks 0, 2 ended",
            "  rank 1, worker 5 on a: it is in f() at x.py:1 (sleeps, 0 % CPU)",
        ]
        assert report.culprits == {}
        later = [report for now in range(33, 50) if (report := turn(standstill, float(now))) is not None]
        assert [report.culprits for report in later] == ([wanted] if wanted else [])
        standstill.take(where(5, "moves"), 70.0)
        assert turn(standstill, 700.0) is None
        standstill.finished(5, 701.0)
        assert turn(standstill, 2000.0) is None


def test_who_waits_for_those_that_have_ended_is_ended():
    standstill = RoundWatchdog(None)
    assert turn(standstill, 0.0) is None
    standstill.finished(3, 5.0)
    standstill.take(where(5, "waits"), 15.0)
    standstill.take(where(8, "waits"), 15.0)
    report = turn(standstill, 100.0)
    assert report is not None
    assert report.text == "round 1 has stood still for 95 s: ranks 1, 2 wait in all_reduce at train.py:9; rank 0 ended"
    assert set(report.culprits) == {5, 8}


def test_of_a_round_in_which_a_worker_has_failed_nothing_is_said():
    standstill = with_a_sleeper(20.0)
    standstill.forget(3)
    assert turn(standstill, 500.0) is None
