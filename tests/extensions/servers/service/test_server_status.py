"""What a server publishes about itself while it serves."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from raw_worker import RawWorker
from served_training import OPTIMIZERS
from server_processes import ServerProcess, ServersOfRun
from support.jobs import wait_until

from rankless.extensions.servers.config import ServerConfig, ServerMode, ServersConfig
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.server_status import encode_activity
from rankless.extensions.servers.tables.id_map import mix, shard_of
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.records.server_traffic_counters import (
    SERVER_PAGE_BYTES,
    SERVER_PAGE_NAME,
    ServerActivity,
    ShardActivity,
    TableActivity,
)
from rankless.records.shared_record import open_shared_file, read_record

pytestmark = pytest.mark.slow
SETTINGS = TableSettings(dim=4)
TOKEN = "t" * 32
SGD = OPTIMIZERS["sgd"]


class WatchedServer:
    """One server for two workers, and its status page."""

    def __init__(self, folder: Path, *, mode: ServerMode = "sync") -> None:
        page = open_shared_file(SERVER_PAGE_NAME, SERVER_PAGE_BYTES)
        assert page is not None
        self.page = page
        config = ServerConfig(
            index=0,
            server_count=1,
            worker_count=2,
            address=f"ipc://{folder}/0",
            token=TOKEN,
            run_id="run",
            mode=mode,
            status_descriptor=page,
        )
        self.process = ServerProcess(config)
        self.config = ServersConfig(addresses=(self.process.address,), token=TOKEN, mode=mode)

    def client(self, worker: int) -> ServerClient:
        return ServerClient(self.config, worker=worker, worker_count=2)

    def wait_for(self, condition: Callable[[ServerActivity], bool]) -> ServerActivity:
        """Return the first activity for which a condition holds."""
        found: list[ServerActivity] = []

        def is_there() -> bool:
            record = read_record(self.page)
            if record is not None:
                found[:] = [msgspec.json.decode(record.data, type=ServerActivity)]
            return bool(found) and condition(found[0])

        wait_until(is_there, seconds=60)
        return found[0]

    def close(self) -> None:
        self.process.close()
        os.close(self.page)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchedServer]:
    watched = WatchedServer(tmp_path)
    yield watched
    watched.close()


def push(table, ids) -> None:
    table.push(ids, np.ones(len(ids), np.int64), np.ones((len(ids), 4), np.float32), SGD)


def test_a_server_publishes_before_any_worker_comes(server: WatchedServer):
    activity = server.wait_for(lambda _: True)
    assert activity.process_id == server.process.process.pid
    assert (activity.transactions, activity.requests, activity.table_count) == (0, 0, 0)
    assert activity.transactions_ahead == (0, 0)


def test_rows_bytes_requests_and_transactions_are_counted(server: WatchedServer):
    ids = np.arange(10)
    with server.client(0) as first, server.client(1) as second:
        tables = [client.open_table("users", SETTINGS) for client in (first, second)]
        tables[0].pull(ids)
        for client, table in zip((first, second), tables, strict=True):
            push(table, ids)
            client.commit()
        activity = server.wait_for(lambda found: found.transactions == 1)
        assert (activity.pulled_rows, activity.pulled_bytes) == (10, 10 * 4 * 4)
        assert activity.pushed_rows == 20
        assert activity.pushed_bytes > 20 * (8 + 8 + 4 * 4)  # ids, occurrences, gradients, and the optimizer
        assert activity.requests >= 7  # 2 open, 1 pull, 2 push, 2 ready
        (table,) = activity.tables
        assert (table.name, table.rows, table.requested_ids, table.shards) == ("users", 10, 30, 1024)
        assert table.memory_bytes > 0
    assert activity.refused == {}


def test_the_hottest_shards_are_those_of_the_ids_that_are_asked_for_most(server: WatchedServer):
    everywhere = np.arange(500)
    shards = [int(shard_of(np.uint64(mix(number)), 10)) for number in everywhere]
    hot = [int(number) for number in everywhere if shards.count(shards[number]) == 1][:2]
    with server.client(0) as client:
        table = client.open_table("users", SETTINGS)
        table.pull(everywhere)
        for _ in range(7):
            table.pull(np.array([hot[0]]))
        for _ in range(20):
            table.pull(np.array([hot[1]]))
        (found,) = server.wait_for(lambda found: found.pulled_rows == 527).tables
    assert [(each.shard, each.requested_ids) for each in found.hottest_shards[:2]] == [
        (shards[hot[1]], 21),
        (shards[hot[0]], 8),
    ]
    assert len(found.hottest_shards) == 3
    assert found.requested_ids == 527


def test_a_worker_that_is_ahead_of_the_others_is_counted(server: WatchedServer):
    with server.client(0) as first, server.client(1) as second:
        tables = [client.open_table("users", SETTINGS) for client in (first, second)]
        for _ in range(3):
            push(tables[0], np.arange(5))
            first.commit()
        activity = server.wait_for(lambda found: found.transactions_ahead[0] == 3)
        assert (activity.transactions, activity.transactions_ahead) == (0, (3, 0))
        for _ in range(3):
            push(tables[1], np.arange(5))
            second.commit()
        assert server.wait_for(lambda found: found.transactions == 3).transactions_ahead == (0, 0)


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_with_steps_of_their_own_workers_are_ahead_of_the_slowest_one(mode: ServerMode, tmp_path: Path):
    server = WatchedServer(tmp_path, mode=mode)
    try:
        with server.client(0) as first, server.client(1) as second:
            for client, steps in ((second, 1), (first, 4)):
                table = client.open_table("users", SETTINGS)
                for _ in range(steps):
                    push(table, np.arange(5))
                    client.commit()
            activity = server.wait_for(lambda found: found.transactions == 5)
            assert activity.transactions_ahead == (3, 0)
    finally:
        server.close()


def test_refused_messages_are_counted_by_reason(server: WatchedServer):
    for _ in range(3):
        with RawWorker(server.process.address, worker_count=2) as worker:
            worker.connect("not its token")
    activity = server.wait_for(lambda found: sum(found.refused.values()) == 3)
    assert activity.refused == {"another token than this run's": 3}
    assert activity.requests == 0


def test_a_server_of_a_part_of_the_shards_names_them_by_their_own_numbers(tmp_path: Path):
    run = ServersOfRun(tmp_path, servers=2, workers=1)
    try:
        assert all(process.process.poll() is None for process in run.processes)  # without a page servers serve, too
        with run.client() as client:
            assert client.open_table("users", SETTINGS).pull(np.arange(3)).shape == (3, 4)
    finally:
        run.close()


def make_activity(tables: int, *, name: str = "table", workers: int = 2) -> ServerActivity:
    hottest = tuple(ShardActivity(shard=shard, requested_ids=10**12) for shard in range(3))
    return ServerActivity(
        process_id=1,
        monotonic=1.0,
        transactions=1,
        requests=1,
        pulled_rows=1,
        pulled_bytes=1,
        pushed_rows=1,
        pushed_bytes=1,
        refused={},
        transactions_ahead=(0,) * workers,
        table_count=tables,
        tables=tuple(
            TableActivity(name=name, rows=1, memory_bytes=1, requested_ids=1, shards=1024, hottest_shards=hottest)
            for _ in range(tables)
        ),
    )


def test_a_record_that_would_be_too_long_has_fewer_tables_but_their_number():
    for tables, workers, left in ((32, 2, 32), (32, 60_000, 8), (0, 200_000, None)):
        activity = make_activity(tables, name="\N{GRINNING FACE}" * 200, workers=workers)
        data = encode_activity(activity, most_bytes=SERVER_PAGE_BYTES)
        assert len(data) <= SERVER_PAGE_BYTES
        if left is None:
            assert data == b""
        else:
            decoded = msgspec.json.decode(data, type=ServerActivity)
            assert (decoded.table_count, len(decoded.tables)) == (tables, left)
