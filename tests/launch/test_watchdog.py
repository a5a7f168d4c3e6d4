"""The watchdog with sleeping processes, simulated times and records of other hosts."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec
import psutil
import pytest
from support.jobs import wait_until

from rankless.config.process_configs import WorkerConfig
from rankless.launch.other_hosts_interface import Peers
from rankless.launch.supervisor.failure_attribution import attribute_failure
from rankless.launch.watchdog.phase_timeouts import STARTUP_STALL_SECONDS
from rankless.launch.watchdog.process_activity import (
    MAX_RETRY_SECONDS,
    ActivityTracker,
    TcpConnections,
    UnansweredConnection,
    read_process_stats,
    read_tcp_connections,
)
from rankless.launch.watchdog.stacks import StackRequest
from rankless.launch.watchdog.watchdog import Watchdog, WatchdogConfig, open_status_pages
from rankless.records.events import Exited, HangDetected, Notice, RankStatus, ScriptFinished, Started


def make_worker_config(rank, world_size):
    return WorkerConfig(
        rank=rank,
        world_size=world_size,
        local_rank=0,
        local_world_size=1,
        device="cpu",
        threads=1,
        backend="gloo",
        master_address="127.0.0.1",
        master_port=1,
        run_id="a",
        seed=0,
        log_file="/dev/null",
    )


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "600"])
    # The tests simulate time, so the process must be asleep before they start.
    wait_until(lambda: psutil.Process(process.pid).name() == "sleep" and read_process_stats(process.pid).state == "S")
    yield process.pid
    process.kill()
    process.wait()


class FakeLeader(Peers):
    """Host 0 as another host sees it."""

    attributes_failures = False
    asks = False

    def take_rank_status_request(self):
        asks, self.asks = self.asks, False
        return asks


class FakeFollowers(Peers):
    """The other hosts as host 0 sees them."""

    count = 0

    def request_rank_status(self):
        self.count += 1


@contextlib.contextmanager
def watch_rank_0(process_id, folder, *, peers=None, timeout_seconds=None):
    """Yield the watchdog of rank 0's host, in a job of two hosts with one worker each."""
    pages = open_status_pages(1, timeout_seconds=timeout_seconds)
    scene = WatchdogConfig(
        worker_configs=[make_worker_config(0, 2)],
        pages=pages,
        timeout_seconds=timeout_seconds,
        peers=peers or Peers(),
        stacks_file=str(folder / "stacks.txt"),
        host_name=lambda rank: "ab"[rank],
    )
    watchdog = Watchdog(scene)
    watchdog.receive(Started(rank=0, time_ns=0, pid=process_id, log_file="/dev/null"))
    yield watchdog
    for page in pages:
        os.close(page)


def collect_records(watchdog, seconds, start=None):
    """Return the records of `seconds` ticks, one second apart on the watchdog's clock."""
    start = time.monotonic() if start is None else start
    return [record for second in range(seconds) for record in watchdog.tick(start + second)]


def waiting_status(still):
    return RankStatus(rank=1, time_ns=0, state="waits", doing="all_reduce", line="train.py:33", idle_seconds=still)


def test_a_report_names_the_missing_rank_and_its_host(sleeper, tmp_path):
    with watch_rank_0(sleeper, tmp_path) as watchdog:
        start = time.monotonic()
        assert collect_records(watchdog, 25, start) == []
        watchdog.receive(waiting_status(still=40.0))
        messages = [record.text for record in collect_records(watchdog, 10, start + 25) if isinstance(record, Notice)]
    assert "rank 1 waits in all_reduce at train.py:33" in messages[0]
    assert "rank 0 on a did not arrive: its stack cannot be read (sleeps, 0 % CPU)" in messages[0]


def test_the_users_timeout_ends_the_job_and_gives_the_verdict(sleeper, tmp_path):
    with watch_rank_0(sleeper, tmp_path, timeout_seconds=20.0) as watchdog:
        watchdog.receive(waiting_status(still=15.0))
        start = time.monotonic()
        first = collect_records(watchdog, 15, start)
        assert [type(record) for record in first if not isinstance(record, RankStatus)] == [Notice]
        watchdog.receive(waiting_status(still=30.0))
        (stuck,) = [record for record in collect_records(watchdog, 20, start + 15) if isinstance(record, HangDetected)]
    verdict = attribute_failure(
        [Started(rank=0, time_ns=0, pid=1, log_file=""), stuck, Exited(rank=1, time_ns=0, exit_code=1)]
    )
    assert (verdict.root_cause_rank, verdict.cause, verdict.exit_code) == (0, "hang", 1)
    assert "did not arrive" in verdict.headline


def test_a_follower_host_sends_the_status_of_its_ranks(sleeper, tmp_path):
    with watch_rank_0(sleeper, tmp_path, peers=FakeLeader()) as watchdog:
        records = collect_records(watchdog, int(STARTUP_STALL_SECONDS) + 5)
    assert [(record.rank, record.state) for record in records] == [(0, "blocked")]


@pytest.mark.exhaustive
def test_no_report_if_no_rank_waits(sleeper, tmp_path):
    with watch_rank_0(sleeper, tmp_path) as watchdog:
        assert all(isinstance(record, RankStatus) for record in collect_records(watchdog, 400))


def test_idle_time_restarts_after_the_watchdog_itself_was_stopped(sleeper, tmp_path):
    with watch_rank_0(sleeper, tmp_path) as watchdog:
        watchdog.receive(waiting_status(still=1.0))
        start = time.monotonic()
        collect_records(watchdog, 3, start)
        assert collect_records(watchdog, 3, start + 1000) == []


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_connection_without_an_answer_is_found_with_its_address(family, address):
    with socket.socket(family) as listening, contextlib.ExitStack() as stack:
        try:
            listening.bind((address, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        listening.listen(0)  # the kernel drops what a full queue cannot take, as a firewall does
        where = listening.getsockname()
        attempts = UnansweredConnection(os.getpid())
        for _ in range(4):
            client = stack.enter_context(socket.socket(family))
            client.setblocking(False)
            client.connect_ex(where)
        wait_until(lambda: read_tcp_connections(os.getpid()).unanswered != ())
        shown = f"[{address}]:{where[1]}" if ":" in address else f"{address}:{where[1]}"
        assert set(read_tcp_connections(os.getpid()).unanswered) == {shown}
        attempts.update(100.0)
        assert attempts.unanswered == shown
    # Between two attempts there is no socket: the address stays known until the next attempt is overdue.
    assert read_tcp_connections(os.getpid()).unanswered == ()
    attempts.update(100.0 + MAX_RETRY_SECONDS / 2)
    assert attempts.unanswered == shown
    attempts.update(101.0 + MAX_RETRY_SECONDS)
    assert attempts.unanswered == ""
    assert read_tcp_connections(2**22) == TcpConnections()


def test_a_connection_that_is_answered_later_is_no_cause():
    with socket.socket() as listening, contextlib.ExitStack() as stack:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        shown = f"127.0.0.1:{listening.getsockname()[1]}"
        attempts = UnansweredConnection(os.getpid())
        clients = [stack.enter_context(socket.socket()) for _ in range(4)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(listening.getsockname())
        wait_until(lambda: read_tcp_connections(os.getpid()).unanswered != ())
        attempts.update(100.0)
        assert attempts.unanswered == shown
        for client in clients:
            client.close()
        stack.enter_context(listening.accept()[0])
        stack.enter_context(socket.create_connection(listening.getsockname()))
        attempts.update(101.0)
        assert attempts.unanswered == ""


def test_a_process_that_polls_is_quiet_but_not_idle():
    process = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.01)"])
    try:
        wait_until(lambda: read_process_stats(process.pid).context_switches > 20)
        tracker = ActivityTracker(process.pid, time.monotonic())
        started = tracker.quiet_since
        before = tracker.stats.context_switches
        # At least 60 switches: more than a second in which an idle process would make 25.
        wait_until(lambda: read_process_stats(process.pid).context_switches > before + 60)
        tracker.update(started + 1.0)
        assert (tracker.quiet_since, tracker.idle_since) == (started, started + 1.0)
    finally:
        process.kill()
        process.wait()


def test_what_children_used_before_their_parent_was_idle_is_no_usage_of_now():
    text = "import os, sys\nwhile os.times().user < 1.0:\n    pass\nprint('done', flush=True)\nsys.stdin.read()"
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {text!r}])"
    process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.read(4) == b"done"
        tracker = ActivityTracker(process.pid, time.monotonic())
        start = tracker.idle_since
        tracker.update(start + 100.0)  # a gap: it is not known to be idle, and its children are not read
        tracker.update(start + 101.0)
        tracker.update(start + 102.0)
        assert tracker.idle_since == start + 100.0
        assert tracker.cpu_percent < 20.0
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def test_ended_ranks_are_not_checked(sleeper, tmp_path):
    with watch_rank_0(sleeper, tmp_path) as watchdog:
        watchdog.receive(Exited(rank=0, time_ns=0, exit_code=0))
        assert collect_records(watchdog, 100) == []


def test_a_process_that_outlives_the_script_of_every_rank_is_reported(sleeper, tmp_path):
    with watch_rank_0(sleeper, tmp_path) as watchdog:
        watchdog.receive(Exited(rank=1, time_ns=0, exit_code=0))
        watchdog.receive(ScriptFinished(rank=0, time_ns=0, exit_code=0))
        records = collect_records(watchdog, int(STARTUP_STALL_SECONDS) + 10)
    (text,) = [record.text for record in records if isinstance(record, Notice)]
    assert "rank 0 on a: its script has ended, but its process still runs" in text


@pytest.mark.parametrize(("number", "shown"), [(signal.SIGSTOP, "is stopped by a signal (kill -CONT"), (0, "sleeps")])
def test_a_rank_that_does_not_start_is_reported_with_its_parent(number, shown, sleeper, tmp_path):
    os.kill(sleeper, number)
    wait_until(lambda: not number or read_process_stats(sleeper).state == "T")
    scene = WatchdogConfig(
        worker_configs=[make_worker_config(0, 1)],
        pages=open_status_pages(1),
        timeout_seconds=20.0,
        peers=Peers(),
        parent_process=lambda: sleeper,
        stacks_file=str(tmp_path / "stacks.txt"),
    )
    records = collect_records(Watchdog(scene), 30)
    (stuck,) = [record for record in records if isinstance(record, HangDetected)]
    assert f"its process has not started: process {sleeper}, which starts the workers, {shown}" in stuck.headline


def test_a_slow_download_is_progress(tmp_path):
    """It takes hardly any CPU time, and sleeps in between."""
    code = "import time\nfile = open('data', 'wb', buffering=0)\nwhile True: file.write(bytes(20000)); time.sleep(0.2)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)

    def wait_for_bytes(number: int) -> None:
        size = (tmp_path / "data").stat().st_size
        wait_until(lambda: (tmp_path / "data").stat().st_size > size + number)
        wait_until(lambda: read_process_stats(process.pid).state == "S")  # it runs while it writes, for an instant

    try:
        wait_until(lambda: (tmp_path / "data").exists())
        wait_for_bytes(0)
        tracker = ActivityTracker(process.pid, time.monotonic())
        start = tracker.idle_since
        tracker.update(start + 0.5)
        tracker.update(start + 1.0)
        wait_for_bytes(50_000)
        tracker.update(start + 2.0)
        assert (tracker.idle_since, tracker.tree_idle_since) == (start, start + 2.0)
        wait_for_bytes(50_000)
        tracker.update(start + 3.0, with_bytes=False)
        assert tracker.tree_idle_since == start + 2.0
    finally:
        process.kill()
        process.wait()


def test_a_process_without_our_handler_never_gets_the_signal(sleeper):
    (page,) = open_status_pages(1, timeout_seconds=None)
    stack_request = StackRequest(sleeper, page, 0.0)
    assert stack_request.is_complete(0.0)
    assert stack_request.stacks == {}
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["tail", f"--pid={sleeper}", "-f", "/dev/null"], timeout=0.2)


def test_a_follower_host_responds_at_once_and_then_reports_recovery(sleeper, tmp_path):
    leader = FakeLeader()
    with watch_rank_0(sleeper, tmp_path, peers=leader) as watchdog:
        start = time.monotonic()
        assert collect_records(watchdog, 3, start) == []
        leader.asks = True
        (answer, later) = collect_records(watchdog, 4, start + 3)
    assert (answer.rank, answer.requested) == (0, True)
    assert answer.state != "moves"
    assert later.state == "moves"


def test_host_0_requests_the_statuses_and_waits_for_the_responses(sleeper, tmp_path):
    peers = FakeFollowers()
    with watch_rank_0(sleeper, tmp_path, peers=peers) as watchdog:
        watchdog.receive(waiting_status(still=40.0))
        start = time.monotonic()
        watchdog.tick(start)
        assert peers.count == 1
        assert watchdog.tick(start + 1) == []
        watchdog.receive(msgspec.structs.replace(waiting_status(still=41.0), doing="barrier", requested=True))
        messages = [record.text for record in collect_records(watchdog, 1, start + 1) if isinstance(record, Notice)]
        assert collect_records(watchdog, 20, start + 2) == []  # a response starts no new check
    assert "rank 1 waits in barrier" in messages[0]
    assert peers.count == 1
