"""The cost of the watchdog: in a worker after every step, and in the agent, which polls its workers once a second.

`ours` is the time of the watchdog. The peer is the step, or the second, so the ratio is the share of the watchdog.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row
from rankless.launch.watchdog.process_activity import ActivityTracker

WORKERS = 8
POLLS = 20


def rows() -> Iterator[Row]:
    """Yield one row for a worker and one for the agent."""
    with tempfile.TemporaryDirectory() as folder:
        run(rankless_run(1, "hang_watch.py"), threads=1, folder=folder)
        times = json.loads((Path(folder) / "times.json").read_text())
    yield make_row("hang_watch_step", peer="the whole step", times=times, aim=0.005)
    yield make_row(
        "hang_watch_agent_8", peer="a second", times=[(poll_seconds(), 1.0) for _ in range(POLLS)], aim=0.005
    )


def poll_seconds() -> float:
    """Return the seconds of one poll of as many workers as a host often has. All are idle: these cost most."""
    workers = [subprocess.Popen(["sleep", "600"]) for _ in range(WORKERS)]
    try:
        trackers = [ActivityTracker(worker.pid, time.monotonic()) for worker in workers]
        os.sched_yield()
        start = time.perf_counter()
        for tracker in trackers:
            tracker.update(time.monotonic() + 1)
        return time.perf_counter() - start
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
