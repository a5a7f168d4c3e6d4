"""Rows of several tables in one request, and rows for which a worker asks servers before it needs them."""

import os

import numpy as np
import pytest
from served_training import OPTIMIZERS
from server_processes import RestartedServer, servers_of_run

from rankless.errors import ServerError
from rankless.extensions.servers.service.server_connection import ConnectionSettings
from rankless.extensions.servers.service.table_pulls import pull_together
from rankless.extensions.servers.tables.row_gradients import RowGradients
from rankless.extensions.servers.tables.row_store import EarlyRowStore
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

SETTINGS = TableSettings(dim=3, dtype="float64")
SGD = OPTIMIZERS["sgd"]
IDS = np.arange(12)


@pytest.fixture
def pair(shared_servers):
    """Two workers of two servers, and their tables."""
    clients, name = shared_servers.clients(2, 2), shared_servers.new_name()
    yield clients, [client.open_table(name, SETTINGS) for client in clients]
    for client in clients:
        client.__exit__(ServerError, None)  # none of them waits for the others


def push(table, value: float) -> None:
    table.push(IDS, np.ones(len(IDS), np.int64), np.full((len(IDS), 3), value), SGD)


def ask(client, *pulls):
    """Ask for rows early, those of all tables in one request to each server."""
    early = [table.request_early(ids) for table, ids in pulls]
    client.request_early_rows()
    return early


def step(clients, tables, value: float) -> None:
    for client, table in zip(clients, tables, strict=True):
        push(table, value)
        client.commit()


def test_rows_that_were_asked_for_before_others_had_completed_the_step_have_it(pair):
    (first, second), tables = pair
    push(tables[0], 1.0)
    first.commit()
    (early,) = ask(first, (tables[0], IDS))  # the other worker's part of the step is missing
    push(tables[1], 2.0)
    second.commit()
    expected = Table(SETTINGS)
    push(expected, 3.0)
    np.testing.assert_array_equal(early.take(), expected.pull(IDS))
    np.testing.assert_array_equal(tables[0].pull(IDS), expected.pull(IDS))


def test_requests_for_several_tables_wait_for_the_step_together(pair, shared_servers):
    (first, second), tables = pair
    name, settings = shared_servers.new_name(), TableSettings(dim=7)
    others = [client.open_table(name, settings) for client in (first, second)]
    step((first, second), tables, 1.0)
    for client, table in zip((first, second), others, strict=True):
        table.push(IDS, np.ones(12, np.int64), np.ones((12, 7), np.float32), SGD)
        if client is first:
            client.commit()
    wanted = [(table, IDS[:count]) for count in (1, 5, 0, 12) for table in (tables[0], others[0])]
    pulls = ask(first, *wanted)
    assert [connection.in_flight for connection in tables[0].requests.connections] == [1, 1]
    second.commit()
    for pull, (table, ids) in zip(pulls, wanted, strict=True):
        np.testing.assert_array_equal(pull.take(), table.pull(ids))


def test_rows_of_an_earlier_step_are_not_used(pair):
    clients, tables = pair
    (early,) = ask(clients[0], (tables[0], IDS))
    step(clients, tables, 1.0)
    assert early.take() is None
    expected = Table(SETTINGS)
    push(expected, 2.0)
    np.testing.assert_array_equal(tables[0].pull(IDS), expected.pull(IDS))


def test_rows_are_not_used_twice(pair):
    clients, tables = pair
    (early,) = ask(clients[0], (tables[0], IDS))
    assert early.take() is not None
    assert early.take() is None


def test_rows_that_were_not_sent_for_are_not_there(pair):
    clients, tables = pair
    early = tables[0].request_early(IDS)
    assert early.take() is None
    early.abandon()
    clients[0].request_early_rows()
    assert tables[0].requests.connections[0].in_flight == 0


def test_a_later_request_takes_the_place_of_an_earlier_one(pair):
    clients, tables = pair
    (first,) = ask(clients[0], (tables[0], IDS))
    (second,) = ask(clients[0], (tables[0], IDS[:3]))
    assert first.take() is None
    assert second.take().shape == (3, 3)


def test_abandoned_rows_are_forgotten_and_the_others_come(pair):
    clients, tables = pair
    pulls = ask(clients[0], *((tables[0], IDS[:count]) for count in (2, 4, 6)))
    pulls[1].abandon()
    assert [None if rows is None else len(rows) for rows in (pull.take() for pull in pulls)] == [2, None, 6]


def test_rows_from_before_a_restored_checkpoint_are_not_used(pair):
    clients, tables = pair
    (early,) = ask(clients[0], (tables[0], IDS))
    for client in clients:
        client.forget_early_rows()
    other = Table(SETTINGS)
    push(other, 5.0)
    tables[1].restore(other.contents())
    assert early.take() is None
    np.testing.assert_array_equal(tables[0].pull(IDS), other.pull(IDS))


def test_early_requests_leave_room_for_others(pair):
    clients, tables = pair
    push(tables[0], 1.0)
    clients[0].commit()
    early = [ask(clients[0], (tables[0], IDS))[0] for _ in range(20)]  # each takes the place of the last one
    assert 4 <= tables[0].requests.connections[0].in_flight < 16
    assert tables[1].statistics().rows == 0  # nobody else waits
    push(tables[0], 1.0)  # of the next step: it is noted, although the pulls wait
    push(tables[1], 1.0)
    clients[1].commit()
    assert all(pull.take() is None for pull in early)  # there was no room for the last one
    assert tables[0].pull(IDS).shape == (12, 3)


def test_rows_that_would_need_several_messages_are_not_asked_for(pair):
    clients, tables = pair
    large, small = ask(clients[0], (tables[0], np.arange(3_000_000)), (tables[0], IDS))
    assert large.take() is None
    assert small.take().shape == (12, 3)


def test_a_change_waits_for_requests_that_nobody_has_needed(pair):
    clients, tables = pair
    step(clients, tables, 1.0)
    (abandoned,) = ask(clients[0], (tables[0], IDS))
    clients[0].prepare([(tables[0], RowGradients(IDS, np.ones(12, np.int64), np.ones((12, 3))))])
    assert tables[0].requests.connections[0].in_flight == 0
    assert abandoned.take() is None


def test_a_worker_leaves_with_requests_that_nobody_has_needed(tmp_path):
    with servers_of_run(tmp_path, servers=1, workers=2) as run:
        first, second = (run.client(worker) for worker in range(2))
        tables = [client.open_table("users", SETTINGS) for client in (first, second)]
        step((first, second), tables, 1.0)
        ask(first, (tables[0], IDS))
        assert tables[0].requests.connections[0].in_flight == 1
        first.close()
        push(tables[1], 3.0)  # a step of one worker: the other one has left
        second.commit()
        expected = Table(SETTINGS)
        push(expected, 2.0)
        push(expected, 3.0)
        np.testing.assert_array_equal(tables[1].pull(IDS), expected.pull(IDS))
        second.close()


def test_early_requests_reach_the_next_process_of_a_killed_server(tmp_path):
    descriptor = os.memfd_create("tables")
    run = RestartedServer(tmp_path, descriptor, workers=2)
    run.start()
    clients = [run.client(number, settings=ConnectionSettings(reconnect_seconds=30)) for number in range(2)]
    tables = [client.open_table("users", SETTINGS) for client in clients]
    push(tables[0], 1.0)
    clients[0].commit()
    (early,) = ask(clients[0], (tables[0], IDS))
    run.restart()
    push(tables[1], 1.0)
    clients[1].commit()
    expected = Table(SETTINGS)
    push(expected, 2.0)
    np.testing.assert_array_equal(early.take(), expected.pull(IDS))
    for client in clients:
        client.close()
    run.close()
    os.close(descriptor)


@pytest.mark.parametrize("servers", [1, 3])
def test_rows_of_several_tables_are_those_of_each(shared_servers, servers):
    (client,) = shared_servers.clients(servers, 1)
    kinds = [TableSettings(dim=dim, dtype=dtype) for dim in (1, 3, 300) for dtype in ("float32", "float64")]
    tables = [client.open_table(shared_servers.new_name(), kind) for kind in kinds]
    generator = np.random.default_rng(1)
    ids = [generator.integers(-(2**63), 2**63 - 1, count) for count in (5, 0, 1, 900, 40, 0)]  # 900 x 300 are alone
    found = pull_together(tables, ids)
    for rows, table, wanted in zip(found, tables, ids, strict=True):
        np.testing.assert_array_equal(rows, Table(table.settings).pull(wanted))
    client.close()


def test_a_table_in_this_process_is_not_asked_early():
    assert not isinstance(Table(SETTINGS), EarlyRowStore)
