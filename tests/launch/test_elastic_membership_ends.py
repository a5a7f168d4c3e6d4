"""The membership of an elastic job: which workers are killed, and which hosts are blacklisted."""

from collections.abc import Iterable

from launch.test_elastic_membership import mark_ready, sent_messages, start_job, start_round, started_workers

from rankless.launch.recovery.membership import FIRST_JOIN_TIMEOUT_SECONDS, JOIN_TIMEOUT_SECONDS, Action, KillAction
from rankless.records.elastic_driver_protocol import RoundStarted, WorkerDismissed


def killed_workers(actions: Iterable[Action]) -> dict[int, str]:
    return {action.worker.number: action.reason for action in actions if isinstance(action, KillAction)}


def test_a_survivor_that_never_becomes_ready_is_killed():
    membership = start_job({"a": 3})
    membership.remove_failed(1, 5.0, is_own=False)
    membership.decide(5.0)
    mark_ready(membership, 3, now=6.0)
    assert killed_workers(membership.decide(5.0 + 2 * JOIN_TIMEOUT_SECONDS)) == {}  # no ready worker has the state
    mark_ready(membership, 0, now=70.0)
    assert killed_workers(membership.decide(70.0 + JOIN_TIMEOUT_SECONDS)) == {}
    assert membership.current_round is not None
    assert set(membership.current_round.assignments) == {0, 3}
    assert killed_workers(membership.decide(71.0 + JOIN_TIMEOUT_SECONDS)) == {2: "did not call hvd.init again for 31 s"}
    assert killed_workers(membership.decide(72.0 + JOIN_TIMEOUT_SECONDS)) == {}  # once


def test_a_survivor_that_becomes_ready_late_is_not_killed():
    membership = start_job({"a": 3})
    membership.remove_failed(1, 5.0, is_own=False)
    membership.decide(5.0)
    mark_ready(membership, 0, 3, now=6.0)
    mark_ready(membership, 2, now=6.0 + JOIN_TIMEOUT_SECONDS)
    start_round(membership, 6.0 + JOIN_TIMEOUT_SECONDS)
    assert killed_workers(membership.decide(900.0)) == {}


def test_a_replacement_that_never_becomes_ready_is_killed():
    membership = start_job({"a": 2})
    membership.remove_failed(1, 5.0, is_own=False)
    assert started_workers(membership.decide(5.0)) == [2]
    mark_ready(membership, 0, now=5.0)
    start_round(membership, 6.0 + JOIN_TIMEOUT_SECONDS)
    assert killed_workers(membership.decide(5.0 + FIRST_JOIN_TIMEOUT_SECONDS)) == {}
    assert killed_workers(membership.decide(6.0 + FIRST_JOIN_TIMEOUT_SECONDS)) == {2: "did not call hvd.init for 601 s"}


def test_a_dismissed_worker_that_does_not_end_is_killed():
    membership = start_job({"a": 2})
    membership.set_hosts({"a": 1}, may_change=True)
    membership.decide(5.0)
    mark_ready(membership, 0, 1, now=6.0, has_state=True)
    assert set(sent_messages(membership.decide(6.0), WorkerDismissed)) == {1}
    assert killed_workers(membership.decide(7.0 + JOIN_TIMEOUT_SECONDS)) == {1: "did not end for 31 s"}


def test_a_lost_host_counts_as_one_failure_and_gets_no_workers_for_a_while():
    membership = start_job({"a": 1, "b": 2})
    for number in (1, 2):
        membership.remove_failed(number, 5.0, is_own=False, is_lost=True)
    assert started_workers(membership.decide(6.0)) == []
    assert membership.failure is None
    assert started_workers(membership.decide(15.0)) == [3, 4]
    for number in (3, 4):
        membership.remove_failed(number, 16.0, is_own=False, is_lost=True)
    assert started_workers(membership.decide(35.0)) == []
    assert started_workers(membership.decide(36.0)) == [5, 6]
    assert membership.remove_failed(5, 37.0, is_own=False, is_lost=True) is None
    assert membership.remove_failed(6, 37.0, is_own=False, is_lost=True) == float("inf")
    assert started_workers(membership.decide(900.0)) == []


def test_after_a_worker_finished_none_starts_and_survivors_may_finish_alone():
    membership = start_job({"a": 3}, min_workers=2)
    membership.remove_failed(1, 5.0, is_own=False)
    assert started_workers(membership.decide(5.0)) == [3]
    membership.remove_finished(0)
    mark_ready(membership, 2, 3, now=5.0)
    actions = membership.decide(5.0)
    assert started_workers(actions) == []
    assert set(sent_messages(actions, WorkerDismissed)) == {3}
    assert set(sent_messages(actions, RoundStarted)) == {2}
    membership.remove_finished(2)
    membership.remove_finished(3)
    assert membership.is_finishing
    assert membership.workers == {}
