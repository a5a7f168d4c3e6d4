"""Real parameter servers that are killed: the agent starts them again, and their tables have what was committed."""

import itertools
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.jobs import wait_until

from rankless.extensions.servers.config import ServerConfig, ServersConfig
from rankless.extensions.servers.launch.processes import ServerProcesses
from rankless.extensions.servers.launch.server_process import ServerLaunch
from rankless.launch.signal_reader import Interrupts
from rankless.records.events import ProcessExited, ProcessRestarted

pytestmark = pytest.mark.slow
pytest.importorskip("zmq")
pytest.importorskip("numba")

from rankless.extensions.servers.service.client import ServerClient  # noqa: E402  # it needs zmq
from rankless.extensions.servers.tables.optimizers import SgdSettings  # noqa: E402
from rankless.extensions.servers.tables.settings import TableSettings  # noqa: E402
from rankless.extensions.servers.tables.table import Table  # noqa: E402

IDS = np.arange(-20, 40)
SETTINGS = TableSettings(dim=3, dtype="float64")
MOMENTUM = SgdSettings(lr=0.1, momentum=0.9)
TOKEN = "t" * 64


@pytest.fixture
def addresses() -> Iterator[tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        yield tuple(f"ipc://{folder}/{index}" for index in range(2))


@pytest.fixture
def servers(addresses: tuple[str, ...], tmp_path: Path) -> Iterator[ServerProcesses]:
    launches = [
        ServerLaunch(
            config=ServerConfig(
                index=index, server_count=2, worker_count=1, address=address, token=TOKEN, run_id="run"
            ),
            variables={},
            log_file=str(tmp_path / f"server{index}.log"),
        )
        for index, address in enumerate(addresses)
    ]
    servers = ServerProcesses(launches)
    try:
        with Interrupts() as interrupts:
            servers.start(interrupts)
        yield servers
    finally:
        servers.close()


def kill_and_wait(servers: ServerProcesses, index: int) -> None:
    """Kill a server, and wait until it serves again."""
    os.kill(servers.list_rows()[index].process_id, signal.SIGKILL)
    records: list[ProcessExited | ProcessRestarted] = []

    def has_come_back() -> bool:
        records.extend(servers.poll())
        return len(records) == 2

    wait_until(has_come_back)
    assert [(type(each), each.number) for each in records] == [(ProcessExited, index), (ProcessRestarted, index)]


@pytest.mark.exhaustive
def test_the_tables_of_killed_servers_have_what_was_committed(servers, addresses):
    run, generator = ServersConfig(addresses=addresses, token=TOKEN), np.random.default_rng(0)
    plain, incarnations = Table(SETTINGS), itertools.count()  # a worker that comes again counts them
    for killed in (1, 0, 1, 1):
        with ServerClient(run, worker=0, worker_count=1, incarnation=next(incarnations)) as client:
            table = client.open_table("users", SETTINGS)
            for _ in range(3):
                ids = generator.choice(IDS, 12, replace=False)
                gradients = generator.normal(size=(12, 3))
                for each in (table, plain):
                    each.push(ids, np.ones(12, np.int64), gradients, MOMENTUM)
                client.commit()
            np.testing.assert_array_equal(table.pull(IDS), plain.pull(IDS))
            table.push(IDS, np.ones(len(IDS), np.int64), np.ones((len(IDS), 3)), MOMENTUM)  # never committed
            kill_and_wait(servers, killed)
        with ServerClient(run, worker=0, worker_count=1, incarnation=next(incarnations)) as client:
            np.testing.assert_array_equal(client.open_table("users", SETTINGS).pull(IDS), plain.pull(IDS))
