"""A worker of an elastic job that is to be ended: it is if it stands still, and left alone while it computes."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from support.jobs import wait_until

from rankless.config.worker_config import WorkerConfig
from rankless.launch.elastic.worker_watchdog import WorkerWatchdog
from rankless.records.events import HangDetected, RankStatus, Started

Turn = Callable[[], list[RankStatus | HangDetected]]
LaterTurns = Callable[[str], tuple[subprocess.Popen[bytes], Turn]]


@pytest.fixture
def worker() -> Iterator[LaterTurns]:
    """A process that runs some code, and is to be ended; and what is told of it at each look, a second after the other
    by the clock of the watch.
    """
    watch = WorkerWatchdog(timeout_seconds=None)
    started: list[subprocess.Popen[bytes]] = []

    def run(code: str) -> tuple[subprocess.Popen[bytes], Turn]:
        process = subprocess.Popen([sys.executable, "-c", f"print(1, flush=True); {code}"], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        config = WorkerConfig(
            rank=4,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            device="cpu",
            threads=1,
            backend="gloo",
            master_address="",
            master_port=0,
            run_id="r",
            seed=None,
            log_file=os.devnull,
        )
        watch.expect(config)
        watch.take(Started(rank=4, time_ns=0, pid=process.pid, log_file=os.devnull))
        watch.end(4, "did not come")
        clock = itertools.count(time.monotonic() + 1)
        return process, lambda: list(watch.turn(next(clock)))

    yield run
    watch.close()
    for process in started:
        process.kill()
        process.communicate()


def test_who_stands_still_is_ended_with_a_word(worker: LaterTurns):
    process, turn = worker("import time; time.sleep(600)")
    news: list[RankStatus | HangDetected] = []
    wait_until(lambda: news.extend(turn()) or process.poll() is not None, seconds=30)
    assert process.returncode == -9
    (stuck,) = [each for each in news if isinstance(each, HangDetected)]
    assert stuck.headline.startswith("did not come: ")
    assert stuck.headline.endswith("; it was ended")


def test_who_computes_is_not(worker: LaterTurns):
    process, turn = worker("\nwhile True: sum(range(1000))")
    assert [turn() for _ in range(60)] == [[]] * 60
    assert process.poll() is None
