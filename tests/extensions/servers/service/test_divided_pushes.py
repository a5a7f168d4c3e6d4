"""Workers push parts of whole gradients, also those of workers that are lost."""

import os

import numpy as np
import pytest
from served_training import OPTIMIZERS
from server_processes import RestartedServer, servers_of_run

from rankless.errors import ServerError
from rankless.extensions.servers.service.server_connection import ConnectionSettings
from rankless.extensions.servers.tables.row_gradients import RowGradients
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table
from rankless.extensions.servers.training.divided_pushes import DividedStore, PushDivision

SETTINGS = TableSettings(dim=2, dtype="float64")
MOMENTUM = OPTIMIZERS["momentum"]
IDS = np.arange(7)
ONES = np.ones(7, np.int64)


class Worker:
    """One worker, with a table on servers."""

    def __init__(self, run, number: int, **settings) -> None:
        self.client = run.client(number, settings=ConnectionSettings(**settings))
        self.division = PushDivision(worker=number, worker_count=3, keeps=True)
        self.served = self.client.open_table("weight 0", SETTINGS)
        self.store = DividedStore(self.served, self.division)

    def step(self, value: float) -> None:
        self.push(value)
        self.commit()

    def push(self, value: float) -> None:
        self.store.push(IDS, ONES, gradients(value), MOMENTUM)

    def commit(self) -> None:
        self.client.commit()
        self.division.end_step(self.client.committed)

    def regroup(self, lost: list[int], committed: int, round_number: int = 1) -> None:
        self.division.regroup(lost, own_committed=self.client.committed, committed=committed)
        self.client.regroup(lost, committed, round_number)


def gradients(value: float):
    return np.outer(np.arange(1.0, 8.0), [value, -value])


def stepped(*values: float):
    """Return the rows after steps of a table in this process."""
    table = Table(SETTINGS)
    for value in values:
        table.push(IDS, ONES, gradients(value), MOMENTUM)
    return table.pull(IDS)


@pytest.fixture
def descriptor():
    descriptor = os.memfd_create("tables")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def workers(tmp_path):
    with servers_of_run(tmp_path, servers=2, workers=3) as run:
        made = [Worker(run, number) for number in range(3)]
        yield made
        for each in made:
            each.client.__exit__(ServerError, None)  # none of them waits for the others


def test_each_row_is_pushed_once(workers):
    for value in (1.0, 2.0):
        for worker in workers:
            worker.step(value)
    np.testing.assert_array_equal(workers[0].store.pull(IDS), stepped(1.0, 2.0))


def test_survivors_make_the_part_of_a_worker_lost_before_its_push(workers):
    first, second, _ = workers
    first.step(1.0)  # it has completed the step when the loss is known, the second one has not begun it
    first.regroup([2], 1)
    second.regroup([2], 1)
    second.step(1.0)
    for worker in (first, second):
        worker.step(2.0)
    np.testing.assert_array_equal(first.store.pull(IDS), stepped(1.0, 2.0))


def test_survivors_make_the_part_of_a_worker_lost_within_its_pushes(workers):
    first, second, third = workers
    second.push(1.0)  # it has begun the step, and has not completed it
    third.push(1.0)
    second.regroup([2], 1)
    second.commit()
    first.regroup([2], 1)
    first.step(1.0)
    np.testing.assert_array_equal(second.store.pull(IDS), stepped(1.0))


def test_a_part_that_a_lost_worker_has_completed_counts_once(workers):
    first, second, third = workers
    third.step(1.0)
    for worker in (first, second):
        worker.step(1.0)
        worker.regroup([2], 1)
    np.testing.assert_array_equal(second.store.pull(IDS), stepped(1.0))


def test_a_second_worker_is_lost_in_the_same_step(workers):
    first, second, _ = workers
    second.step(1.0)
    second.regroup([2], 1)
    first.regroup([2], 1)
    first.regroup([1, 2], 1, 2)  # before it makes the step
    first.step(1.0)
    first.step(2.0)
    np.testing.assert_array_equal(first.store.pull(IDS), stepped(1.0, 2.0))


def test_a_second_worker_is_lost_after_the_first_one_has_made_the_step(workers):
    first, _, _ = workers
    first.step(1.0)
    first.regroup([2], 1)
    first.regroup([1, 2], 1, 2)
    first.step(2.0)
    np.testing.assert_array_equal(first.store.pull(IDS), stepped(1.0, 2.0))


def test_a_step_that_does_not_count_is_made_anew_by_those_that_are_left(workers):
    first, second, third = workers
    third.step(5.0)
    second.step(5.0)
    second.regroup([2], 1)  # and then it is lost, too, before the first one knew of the step
    first.regroup([1, 2], 0, 2)
    first.step(1.0)
    np.testing.assert_array_equal(first.store.pull(IDS), stepped(1.0))


def test_a_restored_weight_waits_for_no_lost_worker(tmp_path):
    interrupted = []

    def go_on() -> None:
        interrupted.append(True)
        for worker in (first, second):
            worker.regroup([2], 1)

    with servers_of_run(tmp_path, servers=2, workers=3) as run:
        first = Worker(run, 0, is_interrupted=lambda: not interrupted, recover=go_on)
        second, third = Worker(run, 1), Worker(run, 2)
        for worker in (first, second):
            worker.step(1.0)
        first.store.restore(Table(SETTINGS).contents())
        assert interrupted
        np.testing.assert_array_equal(second.store.pull(IDS), Table(SETTINGS).pull(IDS))
        for worker in (first, second, third):
            worker.client.__exit__(ServerError, None)


def test_a_worker_sends_no_part_for_itself(workers):
    first, _, _ = workers
    with pytest.raises(ServerError, match="a part of no lost worker"):
        first.served.push_for_lost(0, (1, 0), RowGradients(IDS, ONES, gradients(1.0)))


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("change", [(0, 0), (100, 0), (3, 1 << 30)])
def test_parts_of_other_transactions_are_refused(workers, change):
    first, _, _ = workers
    first.client.commit()
    first.client.commit()
    with pytest.raises(ServerError, match="refuses"):
        first.served.push_for_lost(1, change, RowGradients(IDS, ONES, gradients(1.0)))


def test_a_server_that_starts_again_gets_the_parts_of_lost_workers(tmp_path, descriptor):
    run = RestartedServer(tmp_path, descriptor, workers=3)
    run.start()
    first, second, third = (Worker(run, number, reconnect_seconds=30) for number in range(3))
    third.push(1.0)
    first.step(1.0)
    first.regroup([2], 1)
    run.restart()
    second.regroup([2], 1)
    second.step(1.0)
    np.testing.assert_array_equal(first.store.pull(IDS), stepped(1.0))
    run.close()


def test_a_worker_is_lost_that_was_two_steps_behind_another_one(workers):
    first, second, _ = workers
    first.step(1.0)
    first.step(2.0)  # without a barrier between the two, as `flush` makes a step
    first.regroup([2], 2)
    second.regroup([2], 2)
    for value in (1.0, 2.0, 3.0):
        second.step(value)
    first.step(3.0)
    np.testing.assert_array_equal(first.store.pull(IDS), stepped(1.0, 2.0, 3.0))
