"""The hang watch by itself: processes that only sleep, made-up times and other hosts' records."""

import contextlib
import subprocess
import time

import msgspec
import psutil
import pytest
from support.jobs import wait_until

from rankless.config.worker_config import WorkerConfig
from rankless.launch.rendezvous.peers import SingleHost
from rankless.launch.supervisor.failure_attribution import judge
from rankless.launch.watchdog.process_stats import read_process_stats
from rankless.launch.watchdog.stacks import StackRequest
from rankless.launch.watchdog.step_rate import STARTUP_STALL_SECONDS
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
    # These tests' seconds pass in no time: by then it must have come to its sleep.
    wait_until(lambda: psutil.Process(process.pid).name() == "sleep" and read_process_stats(process.pid).state == "S")
    yield process.pid
    process.kill()
    process.wait()


class FollowerSide(SingleHost):
    """Host 0, seen from another one."""

    judges = False
    asks = False

    def is_asked_where(self):
        asks, self.asks = self.asks, False
        return asks


class LeaderSide(SingleHost):
    """The other hosts, seen from host 0."""

    count = 0

    def ask_where(self):
        self.count += 1


@contextlib.contextmanager
def watch_rank_0(process_id, folder, *, others=None, timeout_seconds=None):
    """The watch of the host of rank 0, of two hosts with a worker each."""
    pages = open_status_pages(1, timeout_seconds=timeout_seconds)
    scene = WatchdogConfig(
        worker_configs=[make_worker_config(0, 2)],
        pages=pages,
        timeout_seconds=timeout_seconds,
        others=others or SingleHost(),
        stacks_file=str(folder / "stacks.txt"),
        host_name=lambda rank: "ab"[rank],
    )
    watchdog = Watchdog(scene)
    watchdog.receive(Started(rank=0, time_ns=0, pid=process_id, log_file="/dev/null"))
    yield watchdog
    watchdog.close()


def collect_records(watchdog, seconds, start=None):
    """What it tells in so many turns, a second apart by its clock."""
    start = time.monotonic() if start is None else start
    return [record for second in range(seconds) for record in watchdog.tick(start + second)]


def waiting_status(still):
    return RankStatus(rank=1, time_ns=0, state="waits", doing="all_reduce", line="train.py:33", still_seconds=still)


def test_a_rank_that_another_host_waits_for_is_named_with_its_host(sleeper, tmp_path):
    with watch_rank_0(sleeper, tmp_path) as watchdog:
        start = time.monotonic()
        assert collect_records(watchdog, 25, start) == []
        watchdog.receive(waiting_status(still=40.0))
        notices = [record.text for record in collect_records(watchdog, 10, start + 25) if isinstance(record, Notice)]
    assert "rank 1 waits in all_reduce at train.py:33" in notices[0]
    assert "rank 0 on a did not come: its stack cannot be read (sleeps, 0 % CPU)" in notices[0]


def test_it_is_ended_after_the_users_timeout_and_that_is_the_verdict(sleeper, tmp_path):
    with watch_rank_0(sleeper, tmp_path, timeout_seconds=20.0) as watchdog:
        watchdog.receive(waiting_status(still=15.0))
        start = time.monotonic()
        first = collect_records(watchdog, 15, start)
        assert [type(record) for record in first if not isinstance(record, RankStatus)] == [Notice]
        watchdog.receive(waiting_status(still=30.0))
        (stuck,) = [record for record in collect_records(watchdog, 20, start + 15) if isinstance(record, HangDetected)]
    verdict = judge([Started(rank=0, time_ns=0, pid=1, log_file=""), stuck, Exited(rank=1, time_ns=0, exit_code=1)])
    assert (verdict.culprit, verdict.cause, verdict.exit_code) == (0, "stuck", 1)
    assert "did not come" in verdict.headline


def test_a_host_that_does_not_judge_tells_where_its_ranks_are(sleeper, tmp_path):
    with watch_rank_0(sleeper, tmp_path, others=FollowerSide()) as watchdog:
        records = collect_records(watchdog, int(STARTUP_STALL_SECONDS) + 5)
    assert [(record.rank, record.state) for record in records] == [(0, "blocked")]


def test_nobody_waits_so_nothing_is_said(sleeper, tmp_path):
    with watch_rank_0(sleeper, tmp_path) as watchdog:
        assert all(isinstance(record, RankStatus) for record in collect_records(watchdog, 400))


def test_when_its_own_process_was_held_up_nothing_is_known_of_the_time_between(sleeper, tmp_path):
    with watch_rank_0(sleeper, tmp_path) as watchdog:
        watchdog.receive(waiting_status(still=1.0))
        start = time.monotonic()
        collect_records(watchdog, 3, start)
        assert collect_records(watchdog, 3, start + 1000) == []


def test_ranks_that_have_ended_are_not_looked_at(sleeper, tmp_path):
    with watch_rank_0(sleeper, tmp_path) as watchdog:
        watchdog.receive(ScriptFinished(rank=0, time_ns=0, exit_code=0))
        assert collect_records(watchdog, 100) == []


def test_a_process_without_our_handler_is_never_sent_the_signal(sleeper):
    (page,) = open_status_pages(1, timeout_seconds=None)
    stack_request = StackRequest(sleeper, page, 0.0)
    assert stack_request.is_complete(0.0)
    assert stack_request.stacks == {}
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["tail", f"--pid={sleeper}", "-f", "/dev/null"], timeout=0.2)


def test_a_host_that_is_asked_tells_at_once_where_its_ranks_are_and_then_that_all_is_well(sleeper, tmp_path):
    host_0 = FollowerSide()
    with watch_rank_0(sleeper, tmp_path, others=host_0) as watchdog:
        start = time.monotonic()
        assert collect_records(watchdog, 3, start) == []
        host_0.asks = True
        (answer, later) = collect_records(watchdog, 4, start + 3)
    assert (answer.rank, answer.asked) == (0, True)
    assert answer.state != "moves"
    assert later.state == "moves"


def test_host_0_asks_the_others_and_waits_for_their_answer(sleeper, tmp_path):
    others = LeaderSide()
    with watch_rank_0(sleeper, tmp_path, others=others) as watchdog:
        watchdog.receive(waiting_status(still=40.0))
        start = time.monotonic()
        watchdog.tick(start)
        assert others.count == 1
        assert watchdog.tick(start + 1) == []
        watchdog.receive(msgspec.structs.replace(waiting_status(still=41.0), doing="barrier", asked=True))
        notices = [record.text for record in collect_records(watchdog, 1, start + 1) if isinstance(record, Notice)]
        assert (
            collect_records(watchdog, 20, start + 2) == []
        )  # an answer is no news: it does not look again before long
    assert "rank 1 waits in barrier" in notices[0]
    assert others.count == 1
