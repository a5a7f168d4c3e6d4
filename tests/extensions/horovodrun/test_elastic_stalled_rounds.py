"""A round of an elastic job without progress: when it is reported, and which worker is killed."""

from rankless.extensions.horovodrun.elastic.driver import StalledRoundDetector, StallReport
from rankless.records.elastic_driver_protocol import RankAssignment
from rankless.records.events import RankState, RankStatus

HOSTS = {3: "a", 5: "a", 8: "b"}
ASSIGNMENTS = {
    number: RankAssignment(rank=rank, size=3, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
    for rank, number in enumerate(HOSTS)
}


def status(number: int, state: RankState, still: float = 10.0) -> RankStatus:
    doing = "all_reduce" if state == "waits" else "sleeps"
    return RankStatus(
        rank=number, time_ns=0, state=state, idle_seconds=still, doing=doing, line="train.py:9", text="f() at x.py:1"
    )


def tick(detector: StalledRoundDetector, now: float, *, round: int = 1) -> StallReport | None:
    return detector.tick(round, ASSIGNMENTS, HOSTS, now)


def watch_sleeping_member(timeout: float | None) -> StalledRoundDetector:
    detector = StalledRoundDetector(timeout)
    assert tick(detector, 0.0) is None
    detector.receive(status(3, "waits"), 10.0)
    detector.receive(status(8, "waits"), 10.0)
    detector.receive(status(5, "blocked"), 12.0)
    return detector


def test_the_missing_member_is_named_and_killed_only_after_many_minutes():
    detector = watch_sleeping_member(None)
    assert tick(detector, 31.0) is None
    report = tick(detector, 32.0)
    assert report is not None
    assert report.text.splitlines() == [
        "round 1 has made no progress for 30 s: ranks 0, 2 wait in all_reduce at train.py:9",
        "  rank 1, worker 5 on a: it is in f() at x.py:1 (sleeps, 0 % CPU)",
    ]
    assert report.workers_to_kill == {}
    assert tick(detector, 60.0) is None
    assert tick(detector, 62.0) is not None  # again after twice the time
    report = tick(detector, 603.0)
    assert report is not None
    assert report.workers_to_kill == {5: "did not arrive while ranks 0, 2 wait in all_reduce at train.py:9 for 601 s"}


def test_the_users_timeout_kills_the_missing_member():
    detector = watch_sleeping_member(45.0)
    first, second = tick(detector, 33.0), tick(detector, 48.0)
    assert first is not None
    assert first.workers_to_kill == {}
    assert second is not None
    assert set(second.workers_to_kill) == {5}


def test_the_round_progresses_as_long_as_one_member_does():
    detector = watch_sleeping_member(20.0)
    detector.receive(status(8, "moves"), 15.0)
    assert tick(detector, 100.0) is None
    detector.receive(status(8, "waits"), 110.0)
    report = tick(detector, 125.0)
    assert report is not None
    assert "has made no progress for 25 s" in report.text


def test_no_member_is_killed_if_none_waits_for_another():
    detector = StalledRoundDetector(20.0)
    assert tick(detector, 0.0) is None
    for number in ASSIGNMENTS:
        detector.receive(status(number, "blocked"), 10.0)
    report = tick(detector, 400.0)
    assert report is not None
    assert report.workers_to_kill == {}


def test_a_new_round_drops_the_statuses_of_the_last():
    detector = watch_sleeping_member(20.0)
    assert tick(detector, 40.0) is not None
    assert tick(detector, 50.0, round=2) is None
    assert tick(detector, 500.0, round=2) is None  # the known statuses describe the wait for the round
    for number in ASSIGNMENTS:
        detector.receive(status(number, "waits"), 520.0)
    assert tick(detector, 530.0, round=2) is not None


def test_a_member_that_ends_late_is_reported_and_killed_only_at_the_users_timeout():
    for timeout, wanted in ((None, {}), (45.0, {5: "did not finish for 45 s, and others have"})):
        detector = StalledRoundDetector(timeout)
        assert tick(detector, 0.0) is None
        detector.mark_finished(3, 5.0)
        detector.mark_finished(8, 6.0)
        assert tick(detector, 9.0) is None
        detector.receive(status(5, "blocked"), 12.0)
        report = tick(detector, 32.0)
        assert report is not None
        assert report.text.splitlines() == [
            "round 1 has made no progress for 30 s: ranks 0, 2 ended",
            "  rank 1, worker 5 on a: it is in f() at x.py:1 (sleeps, 0 % CPU)",
        ]
        assert report.workers_to_kill == {}
        later = [report for now in range(33, 50) if (report := tick(detector, float(now))) is not None]
        assert [report.workers_to_kill for report in later] == ([wanted] if wanted else [])
        detector.receive(status(5, "moves"), 70.0)
        assert tick(detector, 700.0) is None
        detector.mark_finished(5, 701.0)
        assert tick(detector, 2000.0) is None


def test_members_that_wait_for_ended_ones_are_killed():
    detector = StalledRoundDetector(None)
    assert tick(detector, 0.0) is None
    detector.mark_finished(3, 5.0)
    detector.receive(status(5, "waits"), 15.0)
    detector.receive(status(8, "waits"), 15.0)
    report = tick(detector, 100.0)
    assert report is not None
    assert (
        report.text
        == "round 1 has made no progress for 95 s: ranks 1, 2 wait in all_reduce at train.py:9; rank 0 ended"
    )
    assert set(report.workers_to_kill) == {5, 8}


def test_a_round_with_a_failed_member_is_not_reported():
    detector = watch_sleeping_member(20.0)
    detector.forget(3)
    assert tick(detector, 500.0) is None
