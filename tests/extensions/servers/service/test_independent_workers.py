"""Servers in the modes without common steps: a step for each worker's push, when it arrives."""

import dataclasses
import os
import signal
import threading

import numpy as np
import pytest
from served_training import OPTIMIZERS, VOCABULARY, assert_equal_contents, draw_slice, table_settings, together
from server_processes import RestartedServer, servers_of_run
from support.jobs import wait_until

from rankless.errors import ServerError
from rankless.extensions.servers.service.server_connection import ConnectionSettings
from rankless.extensions.servers.tables.optimizers import SgdSettings
from rankless.extensions.servers.tables.settings import Constant, TableSettings
from rankless.extensions.servers.tables.table import Table

SETTINGS = TableSettings(dim=2, dtype="float64")
IDS = np.arange(3)
ADD = SgdSettings(lr=-1.0)
"""With it, a push adds its gradients. Whole numbers are added exactly, in any order."""


class Waits:
    """Notes that a worker waits."""

    def __init__(self) -> None:
        self.began = threading.Event()

    def __call__(self, seconds: float, server: int) -> None:
        self.began.set()
        assert seconds < 60, f"no answer of server {server}"


def add(table, client, number: float = 1.0) -> None:
    table.push(IDS, np.ones(3, np.int64), np.full((3, 2), float(number)), ADD)
    client.commit()


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "sparse_adam"])
@pytest.mark.parametrize("servers", [1, 2])
def test_every_push_is_a_step_in_the_order_of_commits(tmp_path, name, servers):
    with servers_of_run(tmp_path, servers, 3, mode="async") as run:
        clients = [run.client(worker) for worker in range(3)]
        tables = [client.open_table("t", table_settings("every_id")) for client in clients]
        reference = Table(table_settings("every_id"))
        generator = np.random.default_rng(0)
        for worker in generator.integers(0, 3, 60):
            each = draw_slice(generator)
            tables[worker].push(*each, OPTIMIZERS[name])
            clients[worker].commit()
            reference.push(*each, OPTIMIZERS[name])
            reader = generator.integers(0, 3)
            np.testing.assert_allclose(tables[reader].pull(VOCABULARY), reference.pull(VOCABULARY), rtol=0, atol=1e-12)
        for worker in (0, 1, 2):
            assert_equal_contents(tables[worker].contents(), reference.contents())
            clients[worker].close()


def test_pushes_of_workers_at_the_same_time_all_count(tmp_path):
    with servers_of_run(tmp_path, 2, 4, mode="async") as run:
        clients = [run.client(worker) for worker in range(4)]
        tables = [client.open_table("t", SETTINGS) for client in clients]
        before = tables[0].pull(IDS)

        def push_many(worker: int) -> None:
            for number in range(50 + 10 * worker):
                add(tables[worker], clients[worker], number)
                tables[worker].pull(IDS)

        together([lambda worker=worker: push_many(worker) for worker in range(4)])
        total = sum(sum(range(50 + 10 * worker)) for worker in range(4))
        np.testing.assert_allclose(tables[3].pull(IDS) - before, total, rtol=0, atol=1e-9)
        assert tables[3].contents().step == 50 + 60 + 70 + 80
        for client in clients:
            client.close()


@pytest.fixture
def deferring(tmp_path):
    """A server, and a worker that goes on before its changes are answered."""
    with servers_of_run(tmp_path, 1, 1, mode="async") as run:
        client = run.client(0, settings=ConnectionSettings(defers=True, on_wait=Waits()))
        settings = dataclasses.replace(SETTINGS, initial=Constant(value=0.0))
        yield run.processes[0].process, client, client.open_table("t", settings)
        client.__exit__(None, None, None)


def test_a_worker_goes_on_while_a_server_makes_its_steps(deferring):
    server, client, table = deferring
    before = table.pull(IDS)
    server.send_signal(signal.SIGSTOP)
    add(table, client, 3.0)  # returns although the server answers nothing
    server.send_signal(signal.SIGCONT)
    add(table, client, 4.0)
    np.testing.assert_array_equal(table.pull(IDS), before + 7.0)
    client.finish()


def test_many_steps_without_an_answer_wait_for_the_server_and_all_count(deferring):
    _, client, table = deferring
    before = table.pull(IDS)
    for number in range(300):
        add(table, client, number)
    client.wait_until_committed()
    np.testing.assert_array_equal(table.pull(IDS), before + sum(range(300)))


@pytest.mark.parametrize("follows", ["commit", "finish", "wait_until_committed"])
def test_a_step_that_a_server_has_not_noted_is_an_error_of_the_next_one_or_at_the_end(deferring, follows):
    server, client, table = deferring
    server.send_signal(signal.SIGSTOP)
    add(table, client)
    server.kill()
    with pytest.raises(ServerError, match="the connection has broken"):
        getattr(client, follows)()


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_worker_that_is_ahead_waits_for_the_slowest(tmp_path, staleness):
    with servers_of_run(tmp_path, 2, 3, mode="bounded", staleness=staleness) as run:
        waits = Waits()
        ahead = run.client(0, settings=ConnectionSettings(on_wait=waits))
        others = [run.client(worker) for worker in (1, 2)]
        tables = [client.open_table("t", SETTINGS) for client in (ahead, *others)]
        for _ in range(staleness + 1):
            ahead.begin_step()
            tables[0].pull(IDS)
            add(tables[0], ahead)
        tables[0].pull(IDS)  # for no training step
        ahead.begin_step()
        waits.began.clear()  # a server that compiles its functions lets workers wait, too
        pulled = []
        thread = threading.Thread(target=lambda: pulled.append(tables[0].pull(IDS)), daemon=True)
        thread.start()
        assert waits.began.wait(30)
        add(tables[1], others[0])
        assert not pulled  # the other one is as slow
        add(tables[2], others[1], 5.0)
        thread.join(30)
        (rows,) = pulled
        np.testing.assert_allclose(rows - Table(SETTINGS).pull(IDS), staleness + 1 + 1 + 5, rtol=0, atol=1e-12)
        for client in (ahead, *others):
            client.close()


def test_a_worker_that_has_left_holds_nobody_up(tmp_path):
    with servers_of_run(tmp_path, 1, 2, mode="bounded", staleness=0) as run:
        waits = Waits()
        ahead, slow = run.client(0, settings=ConnectionSettings(on_wait=waits)), run.client(1)
        table = ahead.open_table("t", SETTINGS)
        add(table, ahead)
        ahead.begin_step()
        waits.began.clear()
        thread = threading.Thread(target=table.pull, args=(IDS,), daemon=True)
        thread.start()
        assert waits.began.wait(30)
        slow.close()
        thread.join(30)
        assert not thread.is_alive()
        ahead.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_every_acknowledged_push_counts_once_though_servers_are_killed(tmp_path, mode):
    descriptor = os.memfd_create("tables")
    run = RestartedServer(tmp_path, descriptor, workers=3, mode=mode, staleness=2)
    run.start()
    settings = ConnectionSettings(reconnect_seconds=60)
    clients = [run.client(worker, settings=settings) for worker in range(3)]
    tables = [client.open_table("t", SETTINGS) for client in clients]
    before = tables[0].pull(IDS)
    acknowledged = [0, 0, 0]
    ends = threading.Event()

    def push_until_the_end(worker: int) -> None:
        while not ends.is_set():
            clients[worker].begin_step()
            tables[worker].pull(IDS)
            add(tables[worker], clients[worker], 10.0**worker)
            acknowledged[worker] += 1
        clients[worker].close()

    threads = [threading.Thread(target=push_until_the_end, args=(worker,), daemon=True) for worker in range(3)]
    for thread in threads:
        thread.start()
    for kill in range(6):
        least = min(acknowledged)
        wait_until(lambda least=least, kill=kill: min(acknowledged) >= least + kill)
        run.restart()
    ends.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    reader = run.client(0, incarnation=9)
    table = reader.open_table("t", SETTINGS)
    expected = sum(10.0**worker * count for worker, count in enumerate(acknowledged))
    np.testing.assert_allclose(table.pull(IDS) - before, expected, rtol=0, atol=1e-6)
    assert table.contents().step == sum(acknowledged)
    run.close()
    os.close(descriptor)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("kills", [0, 1])
def test_an_optimizer_that_all_workers_begin_with_resets_once(tmp_path, kills):
    """Each worker asks for a reset before its first push with an optimizer, at another time."""
    descriptor = os.memfd_create("tables")
    run = RestartedServer(tmp_path, descriptor, workers=3, mode="async")
    run.start()
    settings = ConnectionSettings(reconnect_seconds=60)
    clients = [run.client(worker, settings=settings) for worker in range(3)]
    tables = [client.open_table("t", SETTINGS) for client in clients]
    reference = Table(SETTINGS)
    for name in ("adagrad", "momentum", "adagrad"):
        reference.reset_states()
        for client, table in zip(clients, tables, strict=True):
            table.reset_states()
            for each in (table, reference):
                each.push(IDS, np.ones(3, np.int64), np.ones((3, 2)), OPTIMIZERS[name])
            client.commit()
            client.wait_until_committed()  # an idle worker would send the step to a new process later
            if kills:
                run.restart()
    assert_equal_contents(tables[1].contents(), reference.contents())
    run.close()
    os.close(descriptor)
