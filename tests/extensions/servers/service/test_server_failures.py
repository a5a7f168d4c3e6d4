"""Servers and workers that fail, or do not belong together: errors name them, and nothing hangs."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from raw_worker import RawWorker
from served_training import OPTIMIZERS, table_settings
from server_processes import ServerProcess, ServersOfRun, servers_of_run

from rankless.errors import ServerError
from rankless.extensions.servers.config import ServerConfig, ServersConfig, server_environment
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.server_connection import ConnectionSettings
from rankless.extensions.servers.service.wire.messages import Kind, MessageHeader
from rankless.extensions.servers.tables.settings import TableSettings

PROGRAM = "rankless.extensions.servers.service.process"
ROOT = Path(__file__).parents[4]
SETTINGS = TableSettings(dim=2)
IDS = np.arange(3)
SGD = OPTIMIZERS["sgd"]


def push(table, settings=SGD) -> None:
    table.push(IDS, np.ones(3, np.int64), np.ones((3, 2), np.float32), settings)


def wait_for_end(process_id: int, seconds: float = 30.0) -> bool:
    """Whether a process, which need not be ours, ends in time."""
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


@pytest.fixture
def run(tmp_path):
    with servers_of_run(tmp_path) as run:
        yield run


def test_a_server_imports_no_torch():
    code = f"import sys, {PROGRAM}, rankless.extensions.servers.service.client\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0


def test_a_server_without_a_configuration_says_so():
    environment = {name: value for name, value in os.environ.items() if name != "RANKLESS_SERVER"}
    command = [sys.executable, "-m", PROGRAM]
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "RANKLESS_SERVER" in done.stderr


def test_a_worker_with_another_token_is_refused(run):
    other = msgspec.structs.replace(run.config, token="another")
    with pytest.raises(ServerError, match="another token"):
        ServerClient(other, worker=0, worker_count=1)
    run.client().close()


def test_a_server_with_another_token_is_not_trusted(tmp_path):
    """It could read the ids, and send any rows."""
    with servers_of_run(tmp_path) as impostor, RawWorker(impostor.config.addresses[0]) as worker:
        header, _ = worker.connect("not its token")
        assert header.kind == Kind.REFUSED
        assert header.session == 0


def test_a_proof_is_of_one_connection_only(run):
    with RawWorker(run.config.addresses[0]) as first, RawWorker(run.config.addresses[0]) as second:
        header, _ = first.connect(run.token)
        assert header.kind == Kind.WELCOME
        second.challenge()
        second.send(MessageHeader(Kind.PROVE), first.statement, b"c" * 32, b"p" * 32)
        assert second.receive()[0].kind == Kind.REFUSED


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"worker": 0, "worker_count": 2}, "a worker of 2 that wants server 0 of 1"),
        ({"worker": 1, "worker_count": 1}, "1"),
        ({"worker": -1, "worker_count": 1}, "-1"),
    ],
)
def test_a_worker_of_another_run_is_refused(run, options, found):
    with pytest.raises(ServerError, match=found):
        ServerClient(run.config, **options)


def test_addresses_in_another_order_are_refused(tmp_path):
    with servers_of_run(tmp_path, servers=2) as run:
        swapped = msgspec.structs.replace(run.config, addresses=run.config.addresses[::-1])
        with pytest.raises(ServerError, match="that wants server"):
            ServerClient(swapped, worker=0, worker_count=1)


def test_one_worker_cannot_connect_twice(run):
    with run.client() as first:
        with pytest.raises(ServerError, match="incarnation"):
            run.client()
        first.open_table("table", SETTINGS).pull(IDS)
        with run.client(incarnation=1) as second:
            second.open_table("table", SETTINGS).pull(IDS)


def test_a_server_that_does_not_listen_is_named(tmp_path):
    address = f"ipc://{tmp_path}/nobody"
    with pytest.raises(ServerError, match=f"server 0 at {address}"):
        ServerClient(ServersConfig(addresses=(address,), token="t"), worker=0, worker_count=1, connect_timeout=0.3)


@pytest.mark.parametrize("address", ["nonsense", "http://127.0.0.1", "tcp://127.0.0.1", "ipc://" + "x" * 500])
def test_an_address_that_cannot_be_is_named(address):
    with pytest.raises(ServerError, match=address[:20]):
        ServerClient(ServersConfig(addresses=(address,), token="t"), worker=0, worker_count=1, connect_timeout=0.3)


def test_a_client_may_connect_before_its_server_listens(tmp_path):
    address = f"ipc://{tmp_path}/later"
    config = ServersConfig(addresses=(address,), token="t")
    server = ServerConfig(index=0, server_count=1, worker_count=1, address=address, token="t", run_id="r")
    processes = []

    def start(_: float, __: int) -> None:
        if not processes:
            processes.append(ServerProcess(server))

    with ServerClient(config, worker=0, worker_count=1, settings=ConnectionSettings(on_wait=start)) as client:
        client.open_table("table", SETTINGS).pull(IDS)
    processes[0].close()


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_server_is_named_within_seconds(tmp_path, killed, tcp):
    with (
        servers_of_run(tmp_path, servers=2, workers=2, tcp=tcp) as run,
        run.client(0) as first,
        run.client(1) as second,
    ):
        table = first.open_table("table", SETTINGS)
        second.open_table("table", SETTINGS)
        first.commit()

        def kill(*_: object) -> None:
            run.processes[killed].process.kill()

        first._requests._on_wait = kill  # when the pull waits for the other worker
        start = time.monotonic()
        with pytest.raises(ServerError, match=f"server {killed} at {run.config.addresses[killed]}"):
            table.pull(np.arange(1000))
        assert time.monotonic() - start < 20
        with pytest.raises(ServerError, match=f"server {killed}"):
            first.commit()


def test_a_server_that_is_started_again_has_lost_the_tables_and_says_so(tmp_path):
    with servers_of_run(tmp_path) as run, run.client() as client:
        table = client.open_table("table", SETTINGS)
        push(table)
        client.commit()
        old = run.processes[0]
        old.process.kill()
        old.process.wait()
        server = ServerConfig(
            index=0, server_count=1, worker_count=1, address=run.config.addresses[0], token=run.token, run_id="r"
        )
        run.processes.append(ServerProcess(server))  # at the same path, which the killed one has left
        assert run.processes[1].address == run.config.addresses[0]
        with pytest.raises(ServerError, match="server 0"):
            table.pull(IDS)


def test_a_server_that_is_ended_tells_workers_that_wait(tmp_path):
    with servers_of_run(tmp_path, workers=2) as run, run.client(0) as first, run.client(1):
        table = first.open_table("table", SETTINGS)
        first.commit()
        first._requests._on_wait = lambda *_: run.processes[0].process.terminate()
        with pytest.raises(ServerError, match="SIGTERM"):
            table.pull(IDS)
        assert run.processes[0].process.wait(30) == 0


def test_the_end_of_a_server_removes_its_path(run, tmp_path):
    assert len(list(tmp_path.iterdir())) == 2  # with its lock
    assert run.processes[0].end() == 0
    assert not list(tmp_path.iterdir())
    assert "ends; refused: {}" in run.processes[0].text()


def test_a_second_server_cannot_take_an_address(run):
    for address in run.config.addresses:
        server = ServerConfig(index=0, server_count=1, worker_count=1, address=address, token="x", run_id="r")
        second = ServerProcess(server)
        assert second.address == ""
        assert second.process.wait(30) == 1
        assert "another server has it" in second.text()
        second.close()
    with run.client() as client:
        client.open_table("table", SETTINGS).pull(IDS)


def test_a_second_server_cannot_take_a_port(tmp_path):
    with servers_of_run(tmp_path, tcp=True) as run:
        (address,) = run.config.addresses
        assert not address.endswith(":0")
        second = ServerProcess(
            ServerConfig(index=0, server_count=1, worker_count=1, address=address, token="x", run_id="r")
        )
        assert second.process.wait(30) == 1
        assert address in second.text()
        second.close()


PARENT = """
import json, os, subprocess, sys
process = subprocess.Popen([sys.executable, "-m", sys.argv[1]], pass_fds=[int(sys.argv[2])])
print(process.pid, flush=True)
sys.stdin.read()
"""


def test_the_death_of_its_parent_ends_a_server(tmp_path):
    reading, writing = os.pipe()
    config = ServerConfig(
        index=0,
        server_count=1,
        worker_count=1,
        address=f"ipc://{tmp_path}/s",
        token="t",
        run_id="r",
        ready_descriptor=writing,
    )
    environment = server_environment(config) | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, PROGRAM, str(writing)],
        env=environment,
        pass_fds=[writing],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    server = int(parent.stdout.readline())
    with os.fdopen(reading) as pipe:
        assert pipe.readline() == f"ready ipc://{tmp_path}/s\n"
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert wait_for_end(server)
    assert not list(tmp_path.iterdir())


def test_the_log_names_what_happened(run):
    with run.client() as client:
        table = client.open_table("users", table_settings("by_count"))
        table.pull(IDS)
    with RawWorker(run.config.addresses[0]) as stranger:
        for _ in range(100):
            stranger.socket.send(b"nonsense")
        stranger.barrier()
    assert run.processes[0].end() == 0
    text = run.processes[0].text()
    assert f"serves at {run.config.addresses[0]}, process {run.processes[0].process.pid}" in text
    assert "table 'users': TableSettings(dim=3" in text
    assert text.count("refused: a header of the wrong size") < 5
    assert "'a header of the wrong size': 100" in text
    assert json.dumps(run.token) not in text
    assert run.token not in text


def test_a_run_of_servers_is_ended(tmp_path):
    run = ServersOfRun(tmp_path, 2, 1)
    run.close()
    assert all(process.process.poll() is not None for process in run.processes)
