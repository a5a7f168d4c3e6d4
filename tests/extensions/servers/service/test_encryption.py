"""Encrypted connections between workers and servers: nothing can be read on the way, and other keys are refused."""

import os
import socket
import threading

import numpy as np
import pytest
import zmq
from served_training import OPTIMIZERS
from server_processes import RestartedServer, servers_of_run
from support.jobs import wait_until

from rankless.errors import ServerError
from rankless.extensions.servers.config import ServersConfig
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.server_connection import ConnectionSettings
from rankless.extensions.servers.service.wire.encryption import encrypt_worker
from rankless.extensions.servers.service.wire.messages import Kind, MessageHeader, make_message
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

IDS = np.arange(500)
SECRET = np.full((500, 4), 0.12345678912345678)
SETTINGS = TableSettings(dim=4, dtype="float64")


def train(client: ServerClient) -> np.ndarray:
    table = client.open_table("rows", SETTINGS)
    for _ in range(3):
        table.push(IDS, np.ones(500, np.int64), SECRET, OPTIMIZERS["adagrad"])
        client.commit()
    return table.pull(IDS)


def trained_here() -> np.ndarray:
    table = Table(SETTINGS)
    for _ in range(3):
        table.push(IDS, np.ones(500, np.int64), SECRET, OPTIMIZERS["adagrad"])
    return table.pull(IDS)


class RecordingForwarder:
    """Forwards one TCP connection to a server, and keeps all that it has forwarded."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = socket.create_connection(("127.0.0.1", port))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        for source, target in ((connection, self._server), (self._server, connection)):
            self._threads.append(threading.Thread(target=self._forward, args=(source, target), daemon=True))
            self._threads[-1].start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            self.seen += data
            target.sendall(data)


@pytest.mark.parametrize("encrypted", [True, False])
def test_rows_and_gradients_cannot_be_read_on_the_way(tmp_path, encrypted):
    with servers_of_run(tmp_path, tcp=True, encrypted=encrypted) as run:
        forwarder = RecordingForwarder(int(run.config.addresses[0].rpartition(":")[2]))
        config = ServersConfig(addresses=(forwarder.address,), token=run.token, encrypted=encrypted)
        with ServerClient(config, worker=0, worker_count=1) as client:
            rows = train(client)
    np.testing.assert_array_equal(rows, trained_here())
    found = [text in forwarder.seen for text in (SECRET[0].tobytes(), rows[7].tobytes(), b'"worker_count"')]
    assert found == [not encrypted] * 3
    assert len(forwarder.seen) > 4 * SECRET.nbytes


def refused_by(process) -> str:
    assert process.end() == 0
    return process.text().rpartition("refused: ")[2]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("tcp", [True, False])
@pytest.mark.parametrize("changes", [{"token": "another"}, {"encrypted": False}], ids=["token", "not encrypted"])
def test_a_worker_without_the_keys_is_refused_and_counted(tmp_path, changes, tcp):
    with servers_of_run(tmp_path, tcp=tcp, encrypted=True) as run:
        given = {"addresses": run.config.addresses, "token": run.token, "encrypted": True} | changes
        with pytest.raises(ServerError, match="server 0 at"):
            ServerClient(ServersConfig(**given), worker=0, worker_count=1, connect_timeout=1.0)
        with run.client() as client:  # the server serves on
            np.testing.assert_array_equal(train(client), trained_here())
        assert "a connection without this run's keys" in refused_by(run.processes[0])


def test_an_encrypted_worker_finds_no_server_that_is_not(tmp_path):
    with servers_of_run(tmp_path) as run:
        config = ServersConfig(addresses=run.config.addresses, token=run.token, encrypted=True)
        with pytest.raises(ServerError, match="server 0 at"):
            ServerClient(config, worker=0, worker_count=1, connect_timeout=1.0)


def test_other_keys_of_a_client_are_refused_before_any_message_is_read(tmp_path):
    """CURVE alone would accept them: the server's public key is not secret, so a client may know it."""
    with servers_of_run(tmp_path, tcp=True, encrypted=True) as run, zmq.Context() as context:
        with context.socket(zmq.DEALER) as client:
            encrypt_worker(client, run.token)
            client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
            client.linger = 0
            client.connect(run.config.addresses[0])
            client.send_multipart(make_message(MessageHeader(Kind.HELLO), ()))
            assert not client.poll(1000)
        assert "a connection without this run's keys" in refused_by(run.processes[0])


def test_a_restarted_server_has_the_same_keys(tmp_path):
    descriptor = os.memfd_create("tables")
    run = RestartedServer(tmp_path, descriptor, encrypted=True)
    config = ServersConfig(addresses=(run.start().address,), token="secret", encrypted=True)
    with ServerClient(config, worker=0, worker_count=1, settings=ConnectionSettings(reconnect_seconds=30)) as client:
        rows = train(client)
        run.restart()
        wait_until(lambda: run.process.process.poll() is None)
        np.testing.assert_array_equal(client.open_table("rows", SETTINGS).pull(IDS), rows)
    run.close()
    os.close(descriptor)
