"""Kills servers of a script's own run, one after the other, at random moments."""

import os
import random
import signal
import threading
from collections.abc import Iterator

import psutil

from rankless.extensions.servers.config import SERVER


class ServerKiller:
    """A thread that kills servers until it has killed `kills`, or is stopped."""

    def __init__(self, kills: int, seed: int) -> None:
        self.killed = 0
        self._kills, self._generator = kills, random.Random(seed)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._kill_servers)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self.killed == self._kills

    def stop(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _kill_servers(self) -> None:
        while not self.is_done and not self._ended.wait(self._generator.uniform(0.01, 0.4)):
            if servers := list(find_servers()):
                os.kill(self._generator.choice(servers), signal.SIGKILL)
                self.killed += 1


def find_servers() -> Iterator[int]:
    """Yield the process ids of this run's servers."""
    own_run = os.environ["TORCHELASTIC_RUN_ID"]
    for process in psutil.process_iter():
        try:
            if own_run in process.environ().get(SERVER, ""):
                yield process.pid
        except (psutil.Error, OSError):
            continue
