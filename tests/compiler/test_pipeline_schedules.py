"""Schedules of pipelines: their idle time and the activations that they hold are those of the papers."""

from itertools import product

import pytest
from simulated_pipelines import split_workers

from rankless.compiler.pipeline_parallel.schedules import Schedule, StageWorkers, Unit, make_schedule
from rankless.records.parallel_plan import PipelineSchedule

SIZES = [(2, 4), (4, 4), (4, 8), (4, 16), (8, 16)]
"""Workers and microbatches."""


def make(name: PipelineSchedule, workers: int, microbatches: int, trains: bool = True) -> Schedule:
    stages = workers * (2 if name == "interleaved" else 1)
    order = StageWorkers.alternate(stages=stages, workers=workers)
    return make_schedule(name, workers=workers, stage_workers=order, microbatches=microbatches, trains=trains)


@pytest.mark.parametrize(("workers", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_workers_wait_as_long_as_the_pipeline_takes_to_fill_and_to_drain(name, workers, microbatches):
    made = make(name, workers, microbatches)
    assert made.idle_fraction == pytest.approx((workers - 1) / (microbatches + workers - 1))


@pytest.mark.parametrize(("workers", "microbatches"), SIZES)
def test_two_stages_per_worker_halve_the_waiting(workers, microbatches):
    made = make("interleaved", workers, microbatches)
    assert made.idle_fraction == pytest.approx((workers - 1) / (2 * microbatches + workers - 1))


@pytest.mark.parametrize(("workers", "microbatches"), SIZES)
def test_gradients_of_parameters_fill_the_waiting_times(workers, microbatches):
    """ZB-H1 waits (P - 1)(F + B - W), which is P - 1 where all three take 1."""
    made = make("zero-bubble", workers, microbatches)
    assert made.makespan == 3 * microbatches + workers - 1


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize(("workers", "microbatches"), SIZES)
def test_workers_hold_the_activations_of_as_many_microbatches_as_each_schedule_says(workers, microbatches):
    places = range(workers)
    assert [make("gpipe", workers, microbatches).count_held(place) for place in places] == [microbatches] * workers
    held = [min(microbatches, workers - place) for place in places]
    assert [make("1f1b", workers, microbatches).count_held(place) for place in places] == held
    assert max(make("zero-bubble", workers, microbatches).count_held(place) for place in places) <= workers
    assert [make("1f1b", workers, microbatches, trains=False).count_held(place) for place in places] == [0] * workers


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_every_order_can_run_and_has_each_unit_once(name):
    """Each worker runs its units in order, and a unit waits for what it needs; none waits for ever."""
    for workers, microbatches, trains in product((1, 2, 3, 5), (1, 2, 3, 7), (True, False)):
        made = make(name, workers, microbatches, trains)
        stages = workers * (2 if name == "interleaved" else 1)
        units = [unit for order in made.workers for unit in order]
        kinds = {unit.kind for unit in units}
        assert len(units) == len(set(units)) == len(kinds) * stages * microbatches
        assert kinds == {"forward"} | ({"backward"} if trains else set()) | (
            {"weights"} if trains and name == "zero-bubble" else set()
        )
        assert all(unit.stage % workers == worker for worker, order in enumerate(made.workers) for unit in order)
        run_in_order(made, stages)


@pytest.mark.parametrize("sizes", [(3, 2), (1, 4), (5, 1), (2, 3, 1)])
@pytest.mark.parametrize("microbatches", [1, 6, 13])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_workers_that_take_turns_run_each_unit_once(name, sizes, microbatches):
    order = split_workers(sizes)
    made = make_schedule(name, workers=sum(sizes), stage_workers=order, microbatches=microbatches, trains=True)
    units = [unit for units in made.workers for unit in units]
    kinds = 3 if name == "zero-bubble" else 2
    assert len(units) == len(set(units)) == kinds * len(sizes) * microbatches
    for worker, own in enumerate(made.workers):
        assert all(order.find_worker(unit.stage, unit.microbatch) == worker for unit in own)
    run_in_order(made, len(sizes))


@pytest.mark.parametrize(("sizes", "microbatches"), [((3, 3), 12), ((1, 1), 4), ((4, 2), 16)])
def test_workers_that_take_turns_are_busy_most_of_the_time(sizes, microbatches):
    made = make_schedule(
        "1f1b",
        workers=sum(sizes),
        stage_workers=split_workers(sizes),
        microbatches=microbatches,
        trains=True,
    )
    slowest = max(microbatches * 3 // size for size in sizes)
    assert made.makespan <= slowest + 2 * 3


def run_in_order(made: Schedule, stages: int) -> None:
    """Run all units, each as soon as its worker and what it needs are ready; fail if none can go on."""
    done: set[Unit] = set()
    waiting = [list(order) for order in made.workers]
    while any(waiting):
        ready = [order for order in waiting if order and needs(order[0], stages) <= done]
        assert ready, f"the workers wait for each other: {[order[0] for order in waiting if order]}"
        for order in ready:
            done.add(order.pop(0))


def needs(unit: Unit, stages: int) -> set[Unit]:
    stage, microbatch = unit.stage, unit.microbatch
    if unit.kind == "forward":
        return {Unit("forward", stage - 1, microbatch)} if stage else set()
    if unit.kind == "weights":
        return {Unit("backward", stage, microbatch)}
    later = {Unit("backward", stage + 1, microbatch)} if stage + 1 < stages else set()
    return {Unit("forward", stage, microbatch)} | later
