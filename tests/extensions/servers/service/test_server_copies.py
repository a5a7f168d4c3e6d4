"""Servers with copies: both hold the same bits after each step, and workers continue with the one that is left."""

import threading

import msgspec
import numpy as np
import pytest
from served_training import (
    OPTIMIZERS,
    TABLES,
    assert_equal_contents,
    draw_slice,
    push_sum,
    table_settings,
    together,
)
from server_processes import ServersOfRun, servers_of_run

from rankless.errors import ServerError
from rankless.extensions.servers.service.replicated_connection import ReplicatedConnection
from rankless.extensions.servers.service.server_connection import ConnectionSettings, ServerAnswer
from rankless.extensions.servers.service.wire.messages import Kind, MessageHeader
from rankless.extensions.servers.service.wire.prepared_pushes import PreparedPush, encode_pushes
from rankless.extensions.servers.tables.optimizers import SgdSettings
from rankless.extensions.servers.tables.row_gradients import RowGradients
from rankless.extensions.servers.tables.table import Table

WORKERS = 2


class Losses:
    """Servers that are lost, as agents tell workers."""

    def __init__(self, run: ServersOfRun) -> None:
        self._run = run
        self.lost: set[int] = set()

    def lose(self, server: int) -> None:
        self._run.processes[server].process.kill()
        self.lost.add(server)

    def settings(self, **more) -> ConnectionSettings:
        return ConnectionSettings(reconnect_seconds=30, is_lost=self.lost.__contains__, **more)


@pytest.fixture
def run(tmp_path):
    """Server 0, and its copy, server 1."""
    with servers_of_run(tmp_path, 1, WORKERS, replicas=1) as run:
        yield run


@pytest.fixture
def losses(run) -> Losses:
    return Losses(run)


@pytest.fixture
def clients(run, losses):
    clients = [run.client(worker, settings=losses.settings()) for worker in range(WORKERS)]
    yield clients
    for client in clients:
        client.__exit__(ConnectionError)


class Training:
    """Steps of all workers on tables, and the same ones on tables in this process."""

    def __init__(self, clients, names, optimizer: str = "momentum") -> None:
        self.clients = clients
        self.tables = [{name: client.open_table(name, table_settings(name)) for name in names} for client in clients]
        self.reference = {name: Table(table_settings(name)) for name in names}
        self._generator = np.random.default_rng(7)
        self._optimizer = OPTIMIZERS[optimizer]

    def step(self, *, between=lambda _worker: None) -> None:
        slices = [{name: draw_slice(self._generator) for name in self.reference} for _ in range(len(self.clients))]
        together([lambda worker=worker: self._step_of(worker, slices[worker], between) for worker in range(WORKERS)])
        for name, table in self.reference.items():
            push_sum(table, [each[name] for each in slices], self._optimizer)

    def _step_of(self, worker: int, slices, between) -> None:
        client, tables = self.clients[worker], self.tables[worker]
        client.prepare([(tables[name], RowGradients(*each)) for name, each in slices.items()])
        between(worker)
        for table in tables.values():
            table.push_prepared(self._optimizer, 1.0)
        client.commit()

    def check(self) -> None:
        for name, table in self.reference.items():
            assert_equal_contents(self.tables[0][name].contents(), table.contents())


def contents_of(run: ServersOfRun, servers, incarnation: int, names) -> list[list[np.ndarray]]:
    """Return the bits that these servers hold, read by a worker that takes part in no step, and leaves again."""
    settings = ConnectionSettings(is_lost=lambda server: server not in servers)
    with run.client(WORKERS, incarnation=incarnation, settings=settings) as client:
        found = [client.open_table(name, table_settings(name)).contents() for name in names]
    return [[each.ids, each.rows, each.used_steps, each.waiting_ids, each.waiting_steps] for each in found]


@pytest.mark.parametrize("optimizer", ["momentum", pytest.param("sparse_adam", marks=pytest.mark.exhaustive)])
def test_a_server_and_its_copy_hold_the_same_bits_after_each_step(tmp_path, optimizer: str):
    names = list(TABLES)
    with servers_of_run(tmp_path, 2, WORKERS + 1, replicas=1) as run:
        clients = [run.client(worker, settings=ConnectionSettings()) for worker in range(WORKERS)]
        training = Training(clients, names, optimizer)
        for incarnation in range(6):
            first, copies = (contents_of(run, servers, incarnation, names) for servers in ((0, 1), (2, 3)))
            for one, other in zip(first, copies, strict=True):
                assert [each.tobytes() for each in one] == [each.tobytes() for each in other]
            assert incarnation == 0 or any(len(each[0]) for each in first)
            training.tables[0][names[0]].pull(np.arange(5))  # a read of one of them changes nothing
            training.step()
        training.check()
        for client in clients:
            client.__exit__(ConnectionError)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lost", [(0, 3), (2, 1), (0, 1), (3, 2)])
def test_workers_go_on_with_the_servers_that_are_left(lost, tmp_path):
    with servers_of_run(tmp_path, 2, WORKERS, replicas=1) as run:
        losses = Losses(run)
        clients = [run.client(worker, settings=losses.settings()) for worker in range(WORKERS)]
        go_on_without(lost, clients, losses)


@pytest.mark.parametrize("lost", [0, 1])
def test_workers_go_on_with_the_server_that_is_left(lost, clients, losses):
    go_on_without([lost], clients, losses)


def go_on_without(lost, clients, losses) -> None:
    training = Training(clients, ["by_count", "every_id"])
    training.step()
    for server in lost:
        losses.lose(server)
        training.step()
        training.check()
    assert training.tables[0]["every_id"].statistics().rows == training.reference["every_id"].statistics().rows
    together([client.close for client in clients])


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("server", [0, 1])
def test_a_server_that_is_lost_between_a_prepare_and_its_commit_loses_no_slice(server, clients, losses):
    training = Training(clients, ["every_id", "capped"])
    barrier = threading.Barrier(WORKERS)

    def lose(worker: int) -> None:
        barrier.wait(30)
        if worker == 0:
            losses.lose(server)

    training.step()
    training.step(between=lose)
    training.step()
    training.check()


def test_contents_are_read_and_restored_anew_if_their_server_is_lost(clients, losses):
    training = Training(clients, ["every_id"])
    training.step()
    losses.lose(0)
    training.check()  # begins to read at the lost server
    for table in training.tables:
        table["every_id"].restore(training.reference["every_id"].contents())
    training.step()
    training.check()


@pytest.mark.exhaustive
def test_workers_may_open_tables_in_different_orders(clients, losses):
    names = ["every_id", "by_count", "capped"]
    together(
        [
            lambda client=client, order=order: [client.open_table(name, table_settings(name)) for name in order]
            for client, order in zip(clients, (names, names[::-1]), strict=True)
        ]
    )
    training = Training(clients, names[1:])
    training.step()
    losses.lose(0)
    training.check()


@pytest.mark.exhaustive
def test_a_worker_that_begins_when_a_server_is_lost_goes_on(run, losses):
    losses.lose(0)
    clients = [run.client(worker, settings=losses.settings()) for worker in range(WORKERS)]
    training = Training(clients, ["every_id"])
    training.step()
    training.check()
    together([client.close for client in clients])


@pytest.mark.exhaustive
def test_a_worker_without_a_server_and_its_copy_raises_and_names_both(clients, losses):
    training = Training(clients, ["every_id"])
    training.step()
    losses.lose(0)
    losses.lose(1)
    with pytest.raises(ServerError, match=r"servers 0 and 1, which have the same tables, are lost"):
        training.tables[0]["every_id"].contents()


def test_a_worker_that_waited_says_that_it_goes_on_without_a_server(run, losses):
    notices: list[str] = []
    clients = [run.client(worker, settings=losses.settings(notify=notices.append)) for worker in range(WORKERS)]
    training = Training(clients, ["every_id"])
    training.step()
    run.processes[0].process.kill()
    with_loss = threading.Timer(1.0, losses.lost.add, (0,))
    with_loss.start()
    training.check()
    assert any("worker 0 waits for server 0 at" in text for text in notices)
    assert any("worker 0 continues without server 0 at" in text and "server 1 at" in text for text in notices)
    together([client.close for client in clients])


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("mode", [{"mode": "async"}, {"mode": "bounded", "staleness": 2}])
def test_steps_of_independent_workers_count_once_also_if_a_server_is_lost(tmp_path, lost, mode):
    """Gradients are whole numbers and the step adds them, so the order of steps changes no bit."""
    settings, ids, steps = table_settings("every_id"), np.arange(40), 60
    with servers_of_run(tmp_path, 1, WORKERS, replicas=1, **mode) as run:
        losses = Losses(run)
        clients = [run.client(worker, settings=losses.settings(defers=True)) for worker in range(WORKERS)]
        tables = [client.open_table("t", settings) for client in clients]
        before = tables[0].pull(ids)

        def train(worker: int) -> None:
            for step in range(steps):
                if worker == 0 and step == steps // 3:
                    losses.lose(lost)
                clients[worker].begin_step()
                tables[worker].pull(ids[:5])
                gradients = np.full((40, settings.dim), -float(1 + worker + 2 * step))
                tables[worker].push(ids, np.ones(40, np.int64), gradients, SgdSettings(lr=1.0))
                clients[worker].commit()
            clients[worker].wait_until_committed()

        together([lambda worker=worker: train(worker) for worker in range(WORKERS)])
        for client in clients:
            client.wait_until_committed()
        expected = sum(1 + worker + 2 * step for worker in range(WORKERS) for step in range(steps))
        np.testing.assert_allclose(tables[1].pull(ids), before + expected, rtol=0, atol=1e-9)
        assert tables[1].step == WORKERS * steps
        together([client.close for client in clients])


class OpenedTables:
    """Stands for a connection whose server has numbered tables in an order of its own."""

    def __init__(self, index: int, numbers: list[int]) -> None:
        self.index, self.worker, self.name, self.address = index, 0, f"server {index}", ""
        self.is_full = False
        self._numbers, self.sent = numbers, []

    def send(self, header, payload=()) -> int:
        self.sent.append((header, payload))
        return len(self.sent)

    def has_answer(self, _number: int) -> bool:
        return True

    def take_answer(self, number: int) -> ServerAnswer:
        return ServerAnswer(self.sent[number - 1][0]._replace(table=self._numbers[number - 1]), [])


def test_prepared_pushes_have_the_numbers_that_each_server_has_for_tables():
    servers = [OpenedTables(0, [0, 1, 2]), OpenedTables(1, [2, 0, 1])]
    connection = ReplicatedConnection(servers, is_lost=lambda _: False, notify=None)
    numbers = [
        connection.take_answer(connection.send(MessageHeader(Kind.OPEN), (name,))).header.table
        for name in (b"a", b"b", b"c")
    ]
    assert numbers == [0, 1, 2]
    pushes = [PreparedPush([number], b"{}", 1.0) for number in numbers]
    connection.send(MessageHeader(Kind.READY), encode_pushes(pushes, 0))
    found = [[each["table"] for each in msgspec.json.decode(server.sent[-1][1][0])] for server in servers]
    assert found == [[0, 1, 2], [2, 0, 1]]
