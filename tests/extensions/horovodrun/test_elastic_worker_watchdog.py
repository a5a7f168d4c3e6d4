"""A worker of an elastic job that should be killed: only while it makes no progress, not while it computes."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from support.jobs import wait_until

from rankless.config.process_configs import WorkerConfig
from rankless.extensions.horovodrun.elastic.local_workers import WorkerWatchdog
from rankless.records.events import HangDetected, RankStatus, Started

Tick = Callable[[], list[RankStatus | HangDetected]]
StartWorker = Callable[[str], tuple[subprocess.Popen[bytes], Tick]]


@pytest.fixture
def worker() -> Iterator[StartWorker]:
    """Start a process that runs some code and should be killed.

    Each call of the returned function advances the watchdog's clock by a second and returns its records.
    """
    watchdog = WorkerWatchdog(timeout_seconds=None)
    started: list[subprocess.Popen[bytes]] = []

    def run(code: str) -> tuple[subprocess.Popen[bytes], Tick]:
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
        watchdog.open_page(config)
        watchdog.receive(Started(rank=4, time_ns=0, pid=process.pid, log_file=os.devnull))
        watchdog.kill_if_stalled(4, "did not arrive")
        clock = itertools.count(time.monotonic() + 1)
        return process, lambda: list(watchdog.tick(next(clock)))

    yield run
    watchdog.close()
    for process in started:
        process.kill()
        process.communicate()


def test_a_worker_without_progress_is_killed_and_reported(worker: StartWorker):
    process, tick = worker("import time; time.sleep(600)")
    records: list[RankStatus | HangDetected] = []
    wait_until(lambda: records.extend(tick()) or process.poll() is not None, seconds=30)
    assert process.returncode == -9
    (hang,) = [each for each in records if isinstance(each, HangDetected)]
    assert hang.headline.startswith("did not arrive: ")
    assert hang.headline.endswith("; it was killed")


def test_a_worker_that_computes_is_left_alone(worker: StartWorker):
    process, tick = worker("\nwhile True: sum(range(1000))")
    assert [tick() for _ in range(60)] == [[]] * 60
    assert process.poll() is None
