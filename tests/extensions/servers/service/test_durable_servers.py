"""Servers whose tables are in memory of another process: a new process of a killed server continues with them."""

import os
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import numpy as np
import pytest
import zmq
from served_training import OPTIMIZERS
from server_processes import RestartedServer, ServerProcess

from rankless.errors import TableError
from rankless.extensions.servers.config import CANNOT_CONTINUE, ServerConfig, ServersConfig
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.server_connection import ConnectionSettings
from rankless.extensions.servers.service.wire.authentication import PROOF_BYTES
from rankless.extensions.servers.service.wire.messages import Kind, MessageHeader, make_message
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

SETTINGS = {"a": TableSettings(dim=3, expire_after_steps=3), "b": TableSettings(dim=2, dtype="float64")}


def test_a_worker_that_leaves_keeps_its_part_until_it_is_committed(tmp_path):
    descriptor = os.memfd_create("tables")
    run = RestartedServer(tmp_path, descriptor, workers=2)
    run.start()
    settings = ConnectionSettings(reconnect_seconds=30)
    first, second = (run.client(number, settings=settings) for number in range(2))
    tables = [client.open_table("a", SETTINGS["b"]) for client in (first, second)]
    for number, table in enumerate(tables):
        table.push(np.array([7, number]), np.ones(2, np.int64), np.full((2, 2), 1.0 + number), OPTIMIZERS["adagrad"])
    first.commit()
    with ThreadPoolExecutor(1) as threads:
        leaving = threads.submit(first.close)
        with pytest.raises(FutureTimeoutError):
            leaving.result(1)  # the other worker's part is missing
        run.restart()
        second.commit()
        leaving.result(30)
    reference = Table(SETTINGS["b"])
    gradients = np.array([[3.0, 3.0], [1.0, 1.0], [2.0, 2.0]])
    reference.push(np.array([7, 0, 1]), np.array([2, 1, 1]), gradients, OPTIMIZERS["adagrad"])
    np.testing.assert_array_equal(tables[1].pull(np.array([7, 0, 1])), reference.pull(np.array([7, 0, 1])))
    second.close()
    run.close()
    os.close(descriptor)


def answer_once(address: str, kind: Kind, payload: bytes) -> None:
    """Be a process of a server that answers one message, and dies."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        identity, *_ = router.recv_multipart()
        router.send_multipart([identity, *make_message(MessageHeader(kind), (payload,))])


def refuse_once(address: str) -> None:
    """Refuse a proof, because the challenge was that of a process that has died."""
    answer_once(address, Kind.CHALLENGE, bytes(PROOF_BYTES))
    answer_once(address, Kind.REFUSED, b"another token than this run's")


def test_a_worker_whose_server_dies_between_challenge_and_proof_goes_on(tmp_path):
    descriptor = os.memfd_create("tables")
    run = RestartedServer(tmp_path, descriptor)
    config = ServersConfig(addresses=(run.start().address,), token="secret")
    with ServerClient(config, worker=0, worker_count=1, settings=ConnectionSettings(reconnect_seconds=30)) as client:
        table = client.open_table("b", SETTINGS["b"])
        wanted = table.pull(np.arange(5))
        run.kill()
        with ThreadPoolExecutor(1) as threads:
            pulling = threads.submit(table.pull, np.arange(5))
            refuse_once(run.process.address)
            run.start()
            np.testing.assert_array_equal(pulling.result(30), wanted)
    run.close()
    os.close(descriptor)


def test_a_worker_that_begins_while_its_server_dies_goes_on(tmp_path):
    descriptor = os.memfd_create("tables")
    run = RestartedServer(tmp_path, descriptor)
    config = ServersConfig(addresses=(run.start().address,), token="secret")
    run.kill()
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(ServerClient, config, worker=0, worker_count=1, connect_timeout=30)
        refuse_once(run.process.address)
        run.start()
        with connecting.result(40) as client:
            assert client.open_table("b", SETTINGS["b"]).step == 0
    run.close()
    os.close(descriptor)


@pytest.fixture
def server(tmp_path):
    descriptor = os.memfd_create("tables")
    server = RestartedServer(tmp_path, descriptor)
    yield server
    server.close()
    os.close(descriptor)


def push(tables, step: int) -> None:
    generator = np.random.default_rng(step)
    for name, table in tables.items():
        ids = np.unique(generator.integers(0, 500, 100))
        gradients = generator.standard_normal((len(ids), SETTINGS[name].dim)).astype(SETTINGS[name].dtype)
        optimizer = list(OPTIMIZERS.values())[step % len(OPTIMIZERS)]
        table.push(ids, np.ones(len(ids), np.int64), gradients, optimizer)


def pulled(tables) -> list[bytes]:
    return [table.pull(np.arange(600)).tobytes() for table in tables.values()]


def test_a_killed_server_goes_on_with_its_tables(server):
    expected = {name: Table(settings) for name, settings in SETTINGS.items()}
    step = 0
    for _ in range(4):
        assert server.start().is_durable
        client = server.client()
        tables = {name: client.open_table(name, settings) for name, settings in SETTINGS.items()}
        assert [table.step for table in tables.values()] == [table.step for table in expected.values()]
        assert pulled(tables) == pulled(expected)
        for _ in range(5):
            step += 1
            push(tables, step)
            client.commit()
            push(expected, step)
        assert pulled(tables) == pulled(expected)
        push(tables, 1000)  # which is never committed
        server.kill()
    server.start()
    assert "continues after transaction 20 with 2 tables" in server.process.text()


def test_restored_contents_outlive_a_server(server):
    expected = {name: Table(settings) for name, settings in SETTINGS.items()}
    for step in range(1, 4):
        push(expected, step)
    server.start()
    client = server.client()
    for name, settings in SETTINGS.items():
        client.open_table(name, settings).restore(expected[name].contents())
    server.kill()
    server.start()
    client = server.client()
    tables = {name: client.open_table(name, settings) for name, settings in SETTINGS.items()}
    assert pulled(tables) == pulled(expected)


@pytest.fixture
def server_of_two(tmp_path):
    descriptor = os.memfd_create("tables")
    server = RestartedServer(tmp_path, descriptor, workers=2)
    yield server
    server.close()
    os.close(descriptor)


def push_alike(clients, step: int) -> None:
    """Push on each worker, and commit."""
    for client in clients:
        push({name: client.open_table(name, settings) for name, settings in SETTINGS.items()}, step)
        client.commit()


def test_a_worker_that_has_left_is_not_waited_for_after_a_restart(server_of_two):
    server_of_two.start()
    clients = [server_of_two.client(worker) for worker in range(2)]
    push_alike(clients, 1)
    clients[1].close()
    server_of_two.kill()
    server_of_two.start()
    client = server_of_two.client(0)
    push_alike([client], 2)
    assert client.open_table("a", SETTINGS["a"]).statistics().rows > 0


def test_a_table_of_an_earlier_process_keeps_its_settings(server):
    server.start()
    server.client().open_table("a", SETTINGS["a"])
    server.kill()
    server.start()
    with pytest.raises(TableError, match="an earlier process of this server"):
        server.client().open_table("a", SETTINGS["b"])


def test_a_server_with_damaged_memory_says_that_it_cannot_go_on(server):
    server.start()
    server.client().open_table("a", SETTINGS["a"])
    server.kill()
    os.pwrite(server._descriptor, b"x" * 8, 0)
    process = server.start()
    assert process.process.wait(30) == CANNOT_CONTINUE
    assert "fix:" in process.text()


def test_a_server_without_durable_memory_says_so(tmp_path):
    config = ServerConfig(
        index=0, server_count=1, worker_count=1, address=f"ipc://{tmp_path}/s", token="secret", run_id="run"
    )
    process = ServerProcess(config)
    assert not process.is_durable
    process.close()
