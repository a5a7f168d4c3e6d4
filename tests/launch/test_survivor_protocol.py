"""The protocol of workers that continue after others were killed, in all orders of its steps."""

from collections.abc import Callable

import pytest
from launch import survivor_model
from launch.survivor_model import Run, explore

from rankless.launch.recovery import survivor_membership
from rankless.launch.recovery.survivor_membership import (
    Action,
    Asked,
    EndRound,
    Event,
    Limits,
    StartRound,
    WorkerMembership,
)

ONE_HOST, TWO_HOSTS = (0, 0, 0), (0, 0, 1, 1)
RUNS = {
    "two workers, one dies": Run((0, 0), 3, 1, Limits(1)),
    "three, one dies": Run(ONE_HOST, 2, 1, Limits(2)),
    "three, two die": Run(ONE_HOST, 1, 2, Limits(2)),
    "three, no more than one may die": Run(ONE_HOST, 1, 2, Limits(1)),
    "two hosts, one dies": Run((0, 0, 1), 1, 1, Limits(2)),
    "two workers that are replaced": Run((0, 0), 2, 2, Limits(1, hosts=(0, 0), copies_first=True)),
    "three, one is replaced": Run(ONE_HOST, 1, 1, Limits(2, hosts=ONE_HOST)),
    "two that divide states and are replaced": Run((0, 0), 2, 2, Limits(1, hosts=(0, 0), copies_first=True), True),
}
LARGE_RUNS = {
    "three, two die, two operations": Run(ONE_HOST, 2, 2, Limits(2)),
    "four on two hosts, two die": Run(TWO_HOSTS, 1, 2, Limits(3)),
    "three, two are replaced": Run(ONE_HOST, 1, 2, Limits(2, hosts=ONE_HOST)),
    "three that divide states, one is replaced": Run(ONE_HOST, 2, 1, Limits(2, hosts=ONE_HOST), True),
    "two hosts, one that divides states is replaced": Run((0, 0, 1), 2, 1, Limits(2, hosts=(0, 0, 1)), True),
    "four on two hosts, three die": Run(TWO_HOSTS, 1, 3, Limits(3)),  # 47 million states: half an hour, and 5 GB
}


@pytest.mark.parametrize("name", RUNS)
def test_each_operation_counts_once_and_nobody_waits_for_ever(name: str):
    assert explore(RUNS[name]) > 500


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LARGE_RUNS)
def test_larger_runs_and_more_deaths(name: str):
    assert explore(LARGE_RUNS[name]) > 100_000


def test_a_lost_worker_is_replaced():
    run = Run(ONE_HOST, 1, 1, Limits(2, hosts=ONE_HOST, copies_first=True), may_refuse=False)
    ends = set()

    def note(state):
        if not any(survivor_model.next_states(state, run)):
            ends.add((tuple(worker.phase for worker in state.workers), state.kills, state.agent.replaced_at >= 0))

    explore(run, note)
    assert (("done",) * 3, 1, True) in ends
    assert not any("dead" in phases and replaced for phases, _, replaced in ends)


Transition = Callable[[WorkerMembership, Event, Limits], tuple[WorkerMembership, list[Action]]]


def start_without_waiting(right: Transition) -> Transition:
    def wrong(before: WorkerMembership, event: Event, limits: Limits) -> tuple[WorkerMembership, list[Action]]:
        state, actions = right(before, event, limits)
        if isinstance(event, Asked) and not actions and not state.has_failed:
            started = StartRound(state.round + 1, tuple(sorted(state.ready)))
            return state._replace(round=started.number, ready=frozenset(), has_ended=False), [started]
        return state, actions

    return wrong


def tell_nobody_of_the_end(right: Transition) -> Transition:
    def wrong(before: WorkerMembership, event: Event, limits: Limits) -> tuple[WorkerMembership, list[Action]]:
        state, actions = right(before, event, limits)
        return state, [each for each in actions if not isinstance(each, EndRound)]

    return wrong


def keep_the_round_that_one_could_not_join(right: Transition) -> Transition:
    def wrong(before: WorkerMembership, event: Event, limits: Limits) -> tuple[WorkerMembership, list[Action]]:
        earlier = Asked(event.rank, before.round - 1) if isinstance(event, Asked) else event
        return right(before, earlier, limits)

    return wrong


def fail_at_the_second_death(right: Transition) -> Transition:
    return lambda before, event, limits: right(before, event, limits._replace(most_lost=1))


@pytest.mark.parametrize(
    "change",
    [
        start_without_waiting,
        tell_nobody_of_the_end,
        keep_the_round_that_one_could_not_join,
        fail_at_the_second_death,
    ],
    ids=lambda change: change.__name__,
)
def test_a_wrong_decision_is_found(change: Callable[[Transition], Transition], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(survivor_model, "transition", change(survivor_membership.transition))
    with pytest.raises(AssertionError):
        explore(RUNS["three, two die"])
