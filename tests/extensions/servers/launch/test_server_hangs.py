"""Real parameter servers that do not answer: the watchdog names them, and workers that lost one are no root cause."""

import dataclasses
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from support.jobs import kill_job, read_process_ids, start_rankless, wait_until

from rankless.errors import ServerError
from rankless.extensions.servers.config import ServerConfig, ServersConfig
from rankless.extensions.servers.launch.processes import ServerProcesses
from rankless.extensions.servers.launch.server_process import ServerLaunch
from rankless.launch.signal_reader import Interrupts
from rankless.launch.supervisor.failure_attribution import find_lost_process
from rankless.launch.watchdog.hang_verdict import BLOCKED_SECONDS, blame_processes, diagnose
from rankless.launch.watchdog.phase_timeouts import StepRate
from rankless.launch.watchdog.processes_beside_workers import ProcessMonitor, ProcessStatus
from rankless.launch.watchdog.report import format_report
from rankless.records.events import (
    NO_RANK,
    ProcessExited,
    ProcessObserved,
    ProcessRestarted,
    Raised,
    RankStatus,
)
from rankless.records.live_run import ProcessRow
from rankless.records.run_json_format import decode_run_summary

WAITING = RankStatus(rank=0, time_ns=0, state="waits", doing="a request to the servers", idle_seconds=100.0)
STOPPED = ProcessStatus(role="server", index=1, doing="does not answer: it is stopped by a signal", state="stopped")
RUNNING = ProcessStatus(role="server", index=0, doing="is idle (0 % CPU)")


def test_a_stopped_server_holds_up_ranks_that_are_idle():
    diagnosis = blame_processes({0: WAITING}, [STOPPED, RUNNING], seconds=30.0)
    assert diagnosis is not None
    assert (diagnosis.silent, diagnosis.waiting, diagnosis.missing) == ((STOPPED,), (WAITING,), ())
    assert diagnosis.abort_after(timeout=5.0, stall_limit=10.0) == 5.0
    assert diagnosis.abort_after(timeout=None, stall_limit=10.0) == BLOCKED_SECONDS


def test_a_running_server_holds_up_nothing():
    assert blame_processes({0: WAITING}, [RUNNING], seconds=30.0) is None
    computing = RankStatus(rank=0, time_ns=0, state="computes")
    assert blame_processes({0: computing}, [STOPPED], seconds=30.0) is None


def test_ranks_that_wait_for_servers_that_compute_are_no_fault_of_the_network():
    ranks = {rank: msgspec.structs.replace(WAITING, rank=rank, doing="a lookup in a table") for rank in (0, 1)}
    found = diagnose(ranks, seconds=30.0, stall_limit=10.0)
    busy = ProcessStatus(role="server", index=1, doing="computes (90 % CPU)", is_busy=True)
    diagnosis = dataclasses.replace(found, busy=(busy,))
    report = format_report(diagnosis, StepRate(), host_name=lambda _: "", stacks_file="", processes=[RUNNING, busy])
    assert "server 1 computes (90 % CPU)\n  no rank is missing: server 1 computes" in report
    assert diagnosis.abort_after(timeout=5.0, stall_limit=10.0) == float("inf")
    assert found.abort_after(timeout=5.0, stall_limit=10.0) == 5.0
    idle = format_report(found, StepRate(), host_name=lambda _: "", stacks_file="", processes=[RUNNING])
    assert "no rank is missing: no server computes: a request or an answer may be lost" in idle
    assert "sizes, dtypes" not in report + idle
    elsewhere = {rank: msgspec.structs.replace(where, doing="all_reduce") for rank, where in ranks.items()}
    found = diagnose(elsewhere, seconds=30.0, stall_limit=10.0)
    assert "sizes, dtypes" in format_report(found, StepRate(), host_name=lambda _: "", stacks_file="", processes=[busy])


def test_a_server_that_computes_makes_progress():
    code = "print('up', flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    row = ProcessRow(role="server", index=0, process_id=process.pid, address="ipc:///run/0", log_file="server0.log")
    monitor = ProcessMonitor(lambda: [row])
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        for now in (0.0, 2.0, 4.0):
            monitor.update(now)
        assert monitor.seconds_since_activity(4.0) == 0.0
        assert [each.is_busy for each in monitor.list_statuses(4.0)] == [True]
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        for now in (6.0, 7.0, 9.0):
            monitor.update(now)
        assert monitor.seconds_since_activity(9.0) >= 2.0
        assert ProcessMonitor(list).seconds_since_activity(9.0) == float("inf")
    finally:
        process.kill()
        process.wait()


def test_a_server_in_a_debugger_never_ends_the_job():
    debugged = ProcessStatus(role="server", index=0, doing="is in a debugger", state="debugged")
    diagnosis = blame_processes({0: WAITING}, [debugged], seconds=30.0)
    assert diagnosis is not None
    assert diagnosis.abort_after(timeout=5.0, stall_limit=10.0) == float("inf")


def test_the_monitor_reads_the_state_of_a_servers_process():
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    row = ProcessRow(role="server", index=3, process_id=process.pid, address="ipc:///run/3", log_file="server3.log")
    monitor = ProcessMonitor(lambda: [row])
    try:
        monitor.update(0.0)
        assert re.fullmatch(r"(computes|is idle) \(\d+ % CPU\)", monitor.list_statuses(0.0)[0].doing)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        monitor.update(1.0)
        (status,) = monitor.list_statuses(1.0)
        assert (status.index, status.state) == (3, "stopped")
        assert f"kill -CONT {process.pid} resumes it" in status.doing
    finally:
        process.kill()
        process.wait()
    monitor.update(2.0)
    assert [each.doing for each in monitor.list_statuses(2.0)] == ["has ended"]


def test_the_monitor_follows_a_server_that_is_started_again():
    rows = [ProcessRow(role="server", index=3, process_id=os.getpid(), address="ipc:///run/3", log_file="server3.log")]
    monitor = ProcessMonitor(lambda: rows)
    monitor.update(0.0)
    assert (monitor.is_restarting, monitor.seconds_since_restart(5.0)) == (False, float("inf"))
    rows[0] = msgspec.structs.replace(rows[0], process_id=os.getppid(), stage="restarting")
    for now in (5.0, 7.0):
        monitor.update(now)
        assert (monitor.is_restarting, monitor.seconds_since_restart(now)) == (True, 0.0)
        (status,) = monitor.list_statuses(now)
        assert (status.doing, status.holds_up) == ("is being started again", False)
    rows[0] = msgspec.structs.replace(rows[0], stage="serves")
    monitor.update(8.0)
    assert (monitor.is_restarting, monitor.seconds_since_restart(8.0)) == (False, 1.0)
    assert re.fullmatch(r"(computes|is idle) \(\d+ % CPU\)", monitor.list_statuses(8.0)[0].doing)
    rows[0] = msgspec.structs.replace(rows[0], process_id=os.getpid())  # between two updates it died and served again
    monitor.update(9.0)
    assert monitor.seconds_since_restart(9.0) == 0.0


def test_host_0_knows_the_servers_of_other_hosts_from_records():
    own = ProcessRow(role="server", index=0, process_id=os.getpid(), address="tcp://a:1", log_file="server0.log")
    monitor = ProcessMonitor(lambda: [own], lambda name: "ab"[name[1]])
    about = {"rank": NO_RANK, "time_ns": 0, "role": "server", "number": 1}
    monitor.receive(ProcessObserved(**about, doing="does not answer", state="stopped"), 1.0)
    monitor.receive(ProcessObserved(**(about | {"number": 0}), doing="is another host's"), 1.0)
    monitor.update(1.0)
    first, second = monitor.list_statuses(1.0)
    assert (first.name, first.doing, first.holds_up) == ("server 1 on b", "does not answer", True)
    assert (second.name, second.holds_up) == ("server 0 on a", False)
    monitor.receive(ProcessExited(**about, exit_code=-9, is_restarted=True), 2.0)
    monitor.update(5.0)
    assert (monitor.is_restarting, monitor.seconds_since_restart(5.0)) == (True, 0.0)
    assert {each.name: each.doing for each in monitor.list_statuses(5.0)}["server 1 on b"] == "is being started again"
    monitor.receive(ProcessRestarted(**about, text="server 1 was killed"), 6.0)
    monitor.update(8.0)
    assert (monitor.is_restarting, monitor.seconds_since_restart(8.0)) == (False, 2.0)
    (record,) = monitor.make_records(8.0)
    assert (record.number, record.state) == (0, "runs")


PULLING = """
import os
import numpy as np
from rankless.config.environment import read_worker_config
from rankless.extensions.servers.config import find_served
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.tables.settings import TableSettings

config = read_worker_config()
with ServerClient(find_served(config.roles), worker=config.rank, worker_count=config.world_size) as client:
    table = client.open_table("users", TableSettings(dim=4))
    table.pull(np.arange(3))
    with open(f"rank{config.rank}.pid", "w") as file:
        file.write(f"{os.getpid()}\\n")
    while True:
        table.pull(np.arange(3))  # here
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_job_whose_server_is_stopped_ends_and_names_the_server(tmp_path: Path):
    pytest.importorskip("zmq")
    pytest.importorskip("numba")
    (tmp_path / "script.py").write_text(PULLING)
    options = ("--no-warm", "--hang-timeout", "8", "--servers", "2", "--workers", "2")
    job = start_rankless("run", *options, "script.py", folder=tmp_path)
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 2 or job.poll() is not None)
        (server,) = [each for each in psutil.Process(job.pid).children() if has_index(each, 1)]
        os.kill(server.pid, signal.SIGSTOP)
        _, messages = job.communicate(timeout=60)
    finally:
        kill_job(job)
    assert job.returncode == 1
    silent = rf"server 1 does not answer: it is stopped by a signal \(kill -CONT {server.pid} resumes it\)"
    places = r"ranks 0, 1 wait in a request to the servers at script\.py:16"
    assert re.search(rf"rankless: no progress for .*: {places}\n  {silent}\n", messages)
    assert re.search(rf"rankless: {silent}; {places} for ", messages)
    assert re.search(r"rankless: its log file is log/\S+/server1\.log; the job was ended, exit code 1\n", messages)
    assert not server.is_running()
    failure = decode_run_summary((tmp_path / "log" / "latest" / "run.json").read_bytes()).failure
    assert failure is not None
    assert (failure.rank, failure.server) == (None, 1)


def has_index(process: psutil.Process, index: int) -> bool:
    return f'"index":{index},' in process.environ().get("RANKLESS_SERVER", "")


@pytest.mark.slow
def test_the_error_of_a_worker_that_lost_its_server_is_recognized(tmp_path: Path):
    pytest.importorskip("zmq")
    client_module = importlib.import_module("rankless.extensions.servers.service.client")
    settings = importlib.import_module("rankless.extensions.servers.tables.settings").TableSettings(dim=2)
    with tempfile.TemporaryDirectory() as folder, Interrupts() as interrupts:
        address, token = f"ipc://{folder}/0", "t" * 64
        config = ServerConfig(index=0, server_count=1, worker_count=1, address=address, token=token, run_id="run")
        servers = ServerProcesses([ServerLaunch(config=config, variables={}, log_file=str(tmp_path / "server0.log"))])
        servers.start(interrupts)
        try:
            run = ServersConfig(addresses=(address,), token=token)
            with client_module.ServerClient(run, worker=0, worker_count=1) as client:
                table = client.open_table("users", settings)
                os.kill(servers.list_rows()[0].process_id, signal.SIGKILL)
                with pytest.raises(ServerError) as error:
                    table.pull(np.arange(3))
            wait_until(lambda: [each.exit_code for each in servers.poll()] == [-signal.SIGKILL])
        finally:
            servers.close()
    text = "".join(traceback.format_exception(error.value))
    assert find_lost_process(
        Raised(rank=0, time_ns=0, error_type="ServerError", message=str(error.value), traceback=text)
    ) == ("server", 0)
