"""Servers make the steps of workers that were lost from what these had prepared."""

import numpy as np
import pytest
from served_training import OPTIMIZERS
from server_processes import servers_of_run

from rankless.errors import LostWorkerError, ServerError, TableError
from rankless.extensions.servers.service.server_connection import ConnectionSettings
from rankless.extensions.servers.tables.row_gradients import RowGradients
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

SETTINGS = TableSettings(dim=2, dtype="float64")
SGD = OPTIMIZERS["sgd"]
IDS = np.arange(6)


def part(worker: int) -> RowGradients:
    return RowGradients(IDS, np.ones(6, np.int64), np.full((6, 2), 1.0 + worker))


@pytest.fixture
def three_workers(tmp_path):
    with servers_of_run(tmp_path, servers=2, workers=3) as run:
        clients = [run.client(worker) for worker in range(3)]
        yield run, clients, [client.open_table("users", SETTINGS) for client in clients]
        for client in clients:
            client.__exit__(ServerError, None)  # none of them waits for the others


def stepped(*parts: RowGradients):
    """Return the rows after one step of a table in this process."""
    table = Table(SETTINGS)
    table.push(IDS, sum(each.occurrences for each in parts), sum(each.gradients for each in parts), SGD)
    return table.pull(IDS)


def prepare(clients, tables) -> None:
    for worker, (client, table) in enumerate(zip(clients, tables, strict=True)):
        client.prepare([(table, part(worker))])


def test_a_step_has_the_part_of_a_worker_that_is_lost_before_its_push(three_workers):
    _, clients, tables = three_workers
    prepare(clients, tables)
    for worker in range(2):
        tables[worker].push_prepared(SGD, 0.5)
        clients[worker].commit()
    for worker in range(2):
        clients[worker].regroup([2], 1, 1)
    halves = [RowGradients(IDS, each.occurrences, each.gradients / 2) for each in map(part, range(3))]
    for table in tables[:2]:
        np.testing.assert_array_equal(table.pull(IDS), stepped(*halves))


def test_a_step_that_does_not_count_is_made_anew_without_the_lost_worker(three_workers):
    _, clients, tables = three_workers
    prepare(clients, tables)
    for worker in range(2):
        clients[worker].regroup([2], 0, 1)
        clients[worker].prepare([(tables[worker], part(7))])
        tables[worker].push_prepared(SGD, 1.0)
        clients[worker].commit()
    np.testing.assert_array_equal(tables[0].pull(IDS), stepped(part(7), part(7)))


def test_what_a_lost_worker_still_sends_is_refused(three_workers):
    run, clients, tables = three_workers
    clients[0].regroup([2], 0, 1)
    with pytest.raises(ServerError):
        tables[2].pull(IDS)
    with pytest.raises(ServerError, match="a worker that the others have not lost"):
        run.client(2, incarnation=1, settings=ConnectionSettings())
    clients[1].regroup([2], 0, 1)
    with pytest.raises(ServerError, match="lost workers of an earlier round"):
        clients[1].regroup([2], 0, 0)


def test_a_lost_worker_whose_part_is_missing_fails_the_step(three_workers):
    _, clients, tables = three_workers
    prepare(clients[:2], tables[:2])
    for worker in range(2):
        tables[worker].push_prepared(SGD, 1.0)
        clients[worker].commit()
    clients[0].regroup([2], 1, 1)
    with pytest.raises(TableError, match="the gradients of worker 2 for transaction 1"):
        tables[0].pull(IDS)


def test_a_later_round_may_drop_a_step_that_a_lost_worker_had_completed(three_workers):
    _, clients, tables = three_workers
    prepare(clients, tables)
    tables[1].push_prepared(SGD, 1.0)
    clients[1].commit()
    clients[1].regroup([2], 1, 1)  # and then it is lost, too, before the first worker has stepped
    clients[0].regroup([1, 2], 0, 2)
    clients[0].prepare([(tables[0], part(4))])
    tables[0].push_prepared(SGD, 1.0)
    clients[0].commit()
    np.testing.assert_array_equal(tables[0].pull(IDS), stepped(part(4)))


def test_gradients_that_were_not_prepared_cannot_be_pushed(three_workers):
    _, clients, tables = three_workers
    tables[0].push_prepared(SGD, 1.0)
    clients[0].commit()
    with pytest.raises(ServerError, match="a push of gradients that were not prepared"):
        tables[0].pull(IDS)


def test_changes_outside_of_a_step_are_not_lost_silently(three_workers):
    _, clients, tables = three_workers
    tables[0].push(IDS, np.ones(6, np.int64), np.ones((6, 2)), SGD)
    with pytest.raises(LostWorkerError, match="outside a job"):
        clients[0].regroup([2], 0, 1)


def test_prepared_pushes_keep_their_place_among_other_changes(three_workers):
    _, clients, tables = three_workers
    momentum = OPTIMIZERS["momentum"]
    wanted = Table(SETTINGS)
    for settings in (momentum, SGD):
        prepare(clients, tables)
        for worker in range(3):
            tables[worker].push_prepared(settings, 1.0)
            tables[worker].reset_states()
            tables[worker].push(IDS, part(worker).occurrences, part(worker).gradients, momentum)
            clients[worker].commit()
        total = sum(part(worker).gradients for worker in range(3))
        wanted.push(IDS, np.full(6, 3), total, settings)
        wanted.reset_states()
        wanted.push(IDS, np.full(6, 3), total, momentum)
    np.testing.assert_array_equal(tables[1].pull(IDS), wanted.pull(IDS))
