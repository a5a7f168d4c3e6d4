"""Which workers of an elastic job are ended, and which hosts are left alone for a while: the roll's words."""

from collections.abc import Iterable

from launch.test_elastic_membership import begin, ready, running, started, told

from rankless.launch.elastic.member import Action, End
from rankless.launch.elastic.membership import FIRST_ROUND_SECONDS, PATIENCE_SECONDS
from rankless.records.elastic_messages import WorkerDismissed


def ended(actions: Iterable[Action]) -> dict[int, str]:
    return {action.worker.number: action.why for action in actions if isinstance(action, End)}


def test_a_survivor_that_does_not_come_is_left_behind_and_ended():
    roll = running({"a": 3})
    roll.failed(1, 5.0, is_own=False)
    roll.turn(5.0)
    ready(roll, 3, now=6.0)
    assert ended(roll.turn(5.0 + 2 * PATIENCE_SECONDS)) == {}  # nobody who has come has the state
    ready(roll, 0, now=70.0)
    assert ended(roll.turn(70.0 + PATIENCE_SECONDS)) == {}
    assert roll.seating is not None
    assert set(roll.seating.assignments) == {0, 3}
    assert ended(roll.turn(71.0 + PATIENCE_SECONDS)) == {2: "did not come to hvd.init again for 31 s"}
    assert ended(roll.turn(72.0 + PATIENCE_SECONDS)) == {}  # once


def test_who_comes_in_the_end_is_not_ended():
    roll = running({"a": 3})
    roll.failed(1, 5.0, is_own=False)
    roll.turn(5.0)
    ready(roll, 0, 3, now=6.0)
    ready(roll, 2, now=6.0 + PATIENCE_SECONDS)
    begin(roll, 6.0 + PATIENCE_SECONDS)
    assert ended(roll.turn(900.0)) == {}


def test_a_replacement_that_never_comes_is_ended_at_last():
    roll = running({"a": 2})
    roll.failed(1, 5.0, is_own=False)
    assert started(roll.turn(5.0)) == [2]
    ready(roll, 0, now=5.0)
    begin(roll, 6.0 + PATIENCE_SECONDS)
    assert ended(roll.turn(5.0 + FIRST_ROUND_SECONDS)) == {}
    assert ended(roll.turn(6.0 + FIRST_ROUND_SECONDS)) == {2: "did not come to hvd.init for 601 s"}


def test_a_dismissed_worker_that_does_not_end_is_ended():
    roll = running({"a": 2})
    roll.hosts_are({"a": 1}, may_change=True)
    roll.turn(5.0)
    ready(roll, 0, 1, now=6.0, has_state=True)
    assert set(told(roll.turn(6.0), WorkerDismissed)) == {1}
    assert ended(roll.turn(7.0 + PATIENCE_SECONDS)) == {1: "did not end for 31 s"}


def test_a_host_that_is_lost_counts_once_and_is_left_alone_for_a_while():
    roll = running({"a": 1, "b": 2})
    for number in (1, 2):
        roll.failed(number, 5.0, is_own=False, is_lost=True)
    assert started(roll.turn(6.0)) == []
    assert roll.trouble is None
    assert started(roll.turn(15.0)) == [3, 4]
    for number in (3, 4):
        roll.failed(number, 16.0, is_own=False, is_lost=True)
    assert started(roll.turn(35.0)) == []
    assert started(roll.turn(36.0)) == [5, 6]
    assert roll.failed(5, 37.0, is_own=False, is_lost=True) is None
    assert roll.failed(6, 37.0, is_own=False, is_lost=True) == float("inf")
    assert started(roll.turn(900.0)) == []
