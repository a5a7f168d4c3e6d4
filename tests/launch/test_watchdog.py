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
from rankless.launch.watchdog.process_stats import vitals_of
from rankless.launch.watchdog.stacks import Question
from rankless.launch.watchdog.step_rate import FIRST_SECONDS
from rankless.launch.watchdog.watchdog import HangWatch, Scene, open_pages
from rankless.records.events import Exited, HangDetected, Notice, RankStatus, ScriptFinished, Started


def config_of(rank, world_size):
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
    wait_until(lambda: psutil.Process(process.pid).name() == "sleep" and vitals_of(process.pid).state == "S")
    yield process.pid
    process.kill()
    process.wait()


class Another(SingleHost):
    """Host 0, seen from another one."""

    judges = False
    asks = False

    def is_asked_where(self):
        asks, self.asks = self.asks, False
        return asks


class Asked(SingleHost):
    """The other hosts, seen from host 0."""

    count = 0

    def ask_where(self):
        self.count += 1


@contextlib.contextmanager
def watching(process_id, folder, *, others=None, timeout_seconds=None):
    """The watch of the host of rank 0, of two hosts with a worker each."""
    pages = open_pages(1, timeout_seconds=timeout_seconds)
    scene = Scene(
        configs=[config_of(0, 2)],
        pages=pages,
        timeout_seconds=timeout_seconds,
        others=others or SingleHost(),
        stacks_file=str(folder / "stacks.txt"),
        host_name=lambda rank: "ab"[rank],
    )
    watch = HangWatch(scene)
    watch.take(Started(rank=0, time_ns=0, pid=process_id, log_file="/dev/null"))
    yield watch
    watch.close()


def told(watch, seconds, start=None):
    """What it tells in so many turns, a second apart by its clock."""
    start = time.monotonic() if start is None else start
    return [record for second in range(seconds) for record in watch.turn(start + second)]


def waits(still):
    return RankStatus(rank=1, time_ns=0, state="waits", doing="all_reduce", line="train.py:33", still_seconds=still)


def test_a_rank_that_another_host_waits_for_is_named_with_its_host(sleeper, tmp_path):
    with watching(sleeper, tmp_path) as watch:
        start = time.monotonic()
        assert told(watch, 25, start) == []
        watch.take(waits(still=40.0))
        said = [record.text for record in told(watch, 10, start + 25) if isinstance(record, Notice)]
    assert "rank 1 waits in all_reduce at train.py:33" in said[0]
    assert "rank 0 on a did not come: its stack cannot be read (sleeps, 0 % CPU)" in said[0]


def test_it_is_ended_after_the_users_timeout_and_that_is_the_verdict(sleeper, tmp_path):
    with watching(sleeper, tmp_path, timeout_seconds=20.0) as watch:
        watch.take(waits(still=15.0))
        start = time.monotonic()
        first = told(watch, 15, start)
        assert [type(record) for record in first if not isinstance(record, RankStatus)] == [Notice]
        watch.take(waits(still=30.0))
        (stuck,) = [record for record in told(watch, 20, start + 15) if isinstance(record, HangDetected)]
    verdict = judge([Started(rank=0, time_ns=0, pid=1, log_file=""), stuck, Exited(rank=1, time_ns=0, exit_code=1)])
    assert (verdict.culprit, verdict.cause, verdict.exit_code) == (0, "stuck", 1)
    assert "did not come" in verdict.headline


def test_a_host_that_does_not_judge_tells_where_its_ranks_are(sleeper, tmp_path):
    with watching(sleeper, tmp_path, others=Another()) as watch:
        records = told(watch, int(FIRST_SECONDS) + 5)
    assert [(record.rank, record.state) for record in records] == [(0, "blocked")]


def test_nobody_waits_so_nothing_is_said(sleeper, tmp_path):
    with watching(sleeper, tmp_path) as watch:
        assert all(isinstance(record, RankStatus) for record in told(watch, 400))


def test_when_its_own_process_was_held_up_nothing_is_known_of_the_time_between(sleeper, tmp_path):
    with watching(sleeper, tmp_path) as watch:
        watch.take(waits(still=1.0))
        start = time.monotonic()
        told(watch, 3, start)
        assert told(watch, 3, start + 1000) == []


def test_ranks_that_have_ended_are_not_looked_at(sleeper, tmp_path):
    with watching(sleeper, tmp_path) as watch:
        watch.take(ScriptFinished(rank=0, time_ns=0, exit_code=0))
        assert told(watch, 100) == []


def test_a_process_without_our_handler_is_never_sent_the_signal(sleeper):
    (page,) = open_pages(1, timeout_seconds=None)
    question = Question(sleeper, page, 0.0)
    assert question.is_answered(0.0)
    assert question.answers == {}
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["tail", f"--pid={sleeper}", "-f", "/dev/null"], timeout=0.2)


def test_a_host_that_is_asked_tells_at_once_where_its_ranks_are_and_then_that_all_is_well(sleeper, tmp_path):
    host_0 = Another()
    with watching(sleeper, tmp_path, others=host_0) as watch:
        start = time.monotonic()
        assert told(watch, 3, start) == []
        host_0.asks = True
        (answer, later) = told(watch, 4, start + 3)
    assert (answer.rank, answer.asked) == (0, True)
    assert answer.state != "moves"
    assert later.state == "moves"


def test_host_0_asks_the_others_and_waits_for_their_answer(sleeper, tmp_path):
    others = Asked()
    with watching(sleeper, tmp_path, others=others) as watch:
        watch.take(waits(still=40.0))
        start = time.monotonic()
        watch.turn(start)
        assert others.count == 1
        assert watch.turn(start + 1) == []
        watch.take(msgspec.structs.replace(waits(still=41.0), doing="barrier", asked=True))
        said = [record.text for record in told(watch, 1, start + 1) if isinstance(record, Notice)]
        assert told(watch, 20, start + 2) == []  # an answer is no news: it does not look again before long
    assert "rank 1 waits in barrier" in said[0]
    assert others.count == 1
