"""`rankless status` of runs with real parameter servers, and of runs on several hosts."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import is_alive, kill_job, rankless, start_rankless, wait_until
from support.server_jobs import start
from support.servers import DURABLE
from support.status_calls import HOLDING, read_one, read_status, wait_for_ranks, wait_for_state

pytestmark = pytest.mark.slow

AHEAD = """
import os, signal
import numpy as np
from rankless.config.environment import read_worker_config
from rankless.extensions.servers.config import find_served
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.server_connection import ConnectionSettings
from rankless.extensions.servers.tables.optimizers import SgdSettings
from rankless.extensions.servers.tables.settings import TableSettings

config = read_worker_config()
settings, servers = ConnectionSettings(60.0), find_served(config.roles)
with ServerClient(servers, worker=config.rank, worker_count=config.world_size, settings=settings) as client:
    table = client.open_table("users", TableSettings(dim=4))
    ids = np.arange(100)
    for step in range(4 if config.rank == 0 else 1):
        table.push(ids, np.ones(100, np.int64), np.ones((100, 4), np.float32), SgdSettings(lr=0.1))
        client.commit()
    if config.rank == 1:
        table.pull(ids)
    open(f"held{config.rank}", "w").close()
    if config.rank == 0:
        table.pull(ids)  # waits for what rank 1 has not pushed
    signal.pause()
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of a run with two servers, whose rank 0 is three transactions ahead of rank 1."""
    pytest.importorskip("zmq")
    pytest.importorskip("numba")
    folder = tmp_path_factory.mktemp("served")
    (folder / "script.py").write_text(AHEAD)
    options = ("--no-warm", "--hang-timeout", "0", "--servers", "2", "--workers", "2")
    job = start_rankless("run", *options, "script.py", folder=folder)
    try:
        wait_for_ranks(job, folder, 0, 1)
        yield folder
    finally:
        kill_job(job)


@pytest.mark.exhaustive
def test_servers_show_what_they_hold_and_what_they_have_done(served: Path):
    def is_settled() -> bool:
        servers = read_one("log/latest", folder=served)["servers"]
        return all(each["activity"] and each["activity"]["transactions_ahead"] == [3, 0] for each in servers)

    wait_until(is_settled)
    status = read_one("log/latest", folder=served)
    assert (status["server_count"], len(status["servers"])) == (2, 2)
    for index, server in enumerate(status["servers"]):
        assert (server["index"], server["state"], server["restarts"]) == (index, "serves", 0)
        assert server["address"].startswith("ipc://")
        assert server["address"].endswith(f"/{index}")
        assert is_alive(server["process_id"])
        assert server["memory_bytes"] > 20 * 2**20
        assert Path(server["log_file"]).is_file()
        assert server["activity"]["process_id"] == server["process_id"]
        assert server["activity"]["transactions"] == 1
        assert (server["transactions_per_second"], server["requests_per_second"]) == (0.0, 0.0)
        (table,) = server["activity"]["tables"]
        assert (table["name"], table["shards"], len(table["hottest_shards"])) == ("users", 512, 3)
        assert all(512 * index <= each["shard"] < 512 * (index + 1) for each in table["hottest_shards"])
    assert sum(server["activity"]["tables"][0]["rows"] for server in status["servers"]) == 100
    assert sum(server["activity"]["pulled_rows"] for server in status["servers"]) == 100
    assert sum(server["activity"]["pushed_rows"] for server in status["servers"]) == 500


def test_a_worker_that_waits_for_servers_has_that_state_and_line(served: Path):
    status = wait_for_state(served, 0, "waits")
    worker = status["workers"][0]
    assert worker["operation"] == "a request to the servers"
    assert worker["place"].startswith("script.py:")
    text = rankless("status", "log/latest", folder=served).stdout
    rows = [line.split() for line in text.splitlines()]
    assert next(row for row in rows if row[:2] == ["rank", "pid"])[-2] == "ahead"
    assert [row[1] for row in rows if row[:1] == ["users"]] == ["0", "1"]


def test_a_stopped_server_is_called_stopped(served: Path):
    process_id = read_one("log/latest", folder=served)["servers"][1]["process_id"]
    os.kill(process_id, signal.SIGSTOP)
    try:
        wait_until(lambda: read_one("log/latest", folder=served)["servers"][1]["state"] == "stopped")
    finally:
        os.kill(process_id, signal.SIGCONT)
    wait_until(lambda: read_one("log/latest", folder=served)["servers"][1]["state"] == "serves")


@pytest.mark.exhaustive
def test_a_killed_server_that_goes_on_has_a_restart_and_its_tables(served: Path):
    before = read_one("log/latest", folder=served)["servers"][0]
    os.kill(before["process_id"], signal.SIGKILL)

    def is_back() -> bool:
        server = read_one("log/latest", folder=served)["servers"][0]
        return server["restarts"] == 1 and server["state"] == "serves" and server["activity"] is not None

    wait_until(is_back)
    wait_until(
        lambda: read_one("log/latest", folder=served)["servers"][0]["activity"]["process_id"] != before["process_id"]
    )
    after = read_one("log/latest", folder=served)["servers"][0]
    assert after["process_id"] != before["process_id"]
    assert after["activity"]["transactions"] == 1
    (table,) = after["activity"]["tables"]
    assert table["rows"] == before["activity"]["tables"][0]["rows"]


@pytest.mark.exhaustive
def test_servers_that_publish_nothing_are_shown_without_counters(tmp_path: Path):
    job = start(tmp_path, "--quiet", server=DURABLE)
    try:
        wait_until(lambda: len(read_one("log/latest", folder=tmp_path)["servers"]) == 2)
        servers = read_one("log/latest", folder=tmp_path)["servers"]
        assert [(each["state"], each["activity"]) for each in servers] == [("serves", None)] * 2
        text = rankless("status", "log/latest", folder=tmp_path).stdout
        assert "ahead" not in text
        assert "  server" in text
    finally:
        kill_job(job)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


@pytest.mark.exhaustive
def test_on_several_hosts_each_shows_its_own_ranks_and_names_the_others(hosts: Hosts, tmp_path: Path):
    (tmp_path / "script.py").write_text(HOLDING)
    listed = ",".join(f"{address}:2" for address in hosts.addresses)
    options = ["--hosts", listed, "--no-ssh", "--insecure", "--hang-timeout", "0"]
    line = [sys.executable, "-m", "rankless", "run", *options, "script.py"]
    jobs = [hosts.start(name, line, cwd=tmp_path) for name in ("a", "b")]
    wait_until(lambda: all((tmp_path / f"held{rank}").exists() for rank in range(4)))
    # The simulated hosts share files and process ids, so one call sees the agents of both.
    first, second = read_status("log/latest", folder=tmp_path)
    assert [first["agent_process_id"], second["agent_process_id"]] == [job.pid for job in jobs]
    assert first["run_id"] == second["run_id"]
    assert [first["host"], second["host"]] == list(hosts.addresses)
    states = [[worker["state"] == "elsewhere" for worker in status["workers"]] for status in (first, second)]
    assert states == [[False, False, True, True], [True, True, False, False]]
    assert [worker["process_id"] is None for worker in first["workers"]] == [False] * 4
    text = rankless("status", "log/latest", folder=tmp_path).stdout
    assert f"  ranks 2 to 3 are on {hosts.addresses[1]}: `rankless status` there shows more\n" in text
    assert f"  ranks 0 to 1 are on {hosts.addresses[0]}: `rankless status` there shows more\n" in text
