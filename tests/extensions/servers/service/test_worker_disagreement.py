"""Workers that do different things, fail, or run ahead of each other."""

import numpy as np
import pytest
from served_training import OPTIMIZERS, together
from server_processes import servers_of_run

from rankless.errors import ServerError, TableError
from rankless.extensions.servers.tables.settings import TableSettings

SETTINGS = TableSettings(dim=2)
IDS = np.arange(3)
SGD = OPTIMIZERS["sgd"]


def push(table, settings=SGD) -> None:
    table.push(IDS, np.ones(3, np.int64), np.ones((3, 2), np.float32), settings)


@pytest.fixture
def two_workers(tmp_path):
    with servers_of_run(tmp_path, servers=2, workers=2) as run:
        clients = [run.client(worker) for worker in range(2)]
        yield clients, [client.open_table("users", SETTINGS) for client in clients]
        for client in clients:
            client.close()


def test_workers_that_open_a_table_with_different_settings(two_workers):
    (first, second), tables = two_workers
    first.open_table("items", TableSettings(dim=4, seed=1))
    with pytest.raises(TableError, match=r"(?s)worker 0.*seed=1.*worker 1.*seed=2"):
        second.open_table("items", TableSettings(dim=4, seed=2))
    for table in tables:
        table.pull(IDS)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("name", ["momentum", "adagrad", "sparse_adam"])
def test_workers_that_push_with_different_settings_both_fail(two_workers, name):
    clients, (first, second) = two_workers
    push(first)
    clients[0].commit()
    with pytest.raises(TableError, match=r"worker 0: push to the table 'users' with SgdSettings.*worker 1: push"):
        push(second, OPTIMIZERS[name])
    with pytest.raises(TableError, match=r"worker 0: push to the table 'users' with SgdSettings.*worker 1: push"):
        first.pull(IDS)
    for client in clients:
        with pytest.raises(TableError, match="the same change of all workers"):
            client.open_table("users", SETTINGS)


def test_a_push_and_a_reset_do_not_go_together(two_workers):
    _, (first, second) = two_workers
    push(first)
    with pytest.raises(TableError, match="worker 1: reset of the states"):
        second.reset_states()


def test_workers_that_make_different_numbers_of_pushes_both_fail(two_workers):
    clients, (first, second) = two_workers
    push(first)
    for client in clients:
        client.commit()
    for table in (first, second):
        with pytest.raises(TableError, match="1 of worker 0, 0 of worker 1"):
            table.pull(IDS)


def test_a_wait_that_is_interrupted_makes_the_client_unusable(two_workers):
    """Nobody knows whether the servers have done what it waited for: a repeated push could count twice."""
    clients, (first, _) = two_workers
    clients[0].commit()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    clients[0]._requests._on_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        first.pull(IDS)
    with pytest.raises(ServerError, match="interrupted"):
        push(first)


def test_on_wait_is_called_with_the_server_that_has_not_answered(two_workers):
    clients, (first, second) = two_workers
    calls = []
    clients[0].commit()

    def note(seconds: float, server: int) -> None:
        calls.append((seconds, server))
        if len(calls) == 2:
            clients[1].commit()

    clients[0]._requests._on_wait = note
    first.pull(IDS)
    assert {server for _, server in calls} <= {0, 1}
    assert 0 < calls[0][0] < calls[1][0] < 5
    second.pull(IDS)


@pytest.mark.parametrize("how", ["pushed", "raised"])
def test_a_worker_that_fails_does_not_leave(two_workers, how):
    """The others must not go on without its part of the batch."""
    clients, (first, second) = two_workers
    if how == "pushed":
        push(second)
        clients[1].close()
    else:
        with pytest.raises(ZeroDivisionError), clients[1]:
            1 / 0  # noqa: B018
    before = first.pull(IDS)
    push(first)
    clients[0].commit()

    def stop(*_: object) -> None:
        raise TimeoutError

    clients[0]._requests._on_wait = stop
    with pytest.raises(TimeoutError):
        first.pull(IDS)
    assert before.shape == (3, 2)


def test_a_new_incarnation_begins_its_transaction_anew(tmp_path):
    with servers_of_run(tmp_path, servers=2, workers=2) as run:
        first, lost = run.client(0), run.client(1)
        tables = [client.open_table("table", SETTINGS) for client in (first, lost)]
        before = tables[0].pull(IDS)
        push(tables[1])
        lost.close()
        with run.client(1, incarnation=1) as second:
            table = second.open_table("table", SETTINGS)
            for each in (tables[0], table):
                push(each)
            first.commit()
            second.commit()
            np.testing.assert_allclose(before - tables[0].pull(IDS), 0.2, atol=1e-6)
        first.close()


def test_a_worker_that_is_far_ahead_waits(tmp_path):
    with servers_of_run(tmp_path, workers=2) as run, run.client(0) as first, run.client(1) as second:
        tables = [client.open_table("table", SETTINGS) for client in (first, second)]

        def train(client, table) -> int:
            for _ in range(40):
                push(table)
                client.commit()
            return table.contents().step

        assert together([lambda: train(first, tables[0]), lambda: train(second, tables[1])]) == [40, 40]


def test_settings_that_cannot_be_sent_are_refused(two_workers):
    _, (first, _) = two_workers
    for lr in (float("nan"), float("inf")):
        with pytest.raises(TableError, match="finite"):
            push(first, type(SGD)(lr=lr))
