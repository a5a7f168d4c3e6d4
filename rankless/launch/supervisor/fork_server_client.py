"""The agent's end of the workers' parent: starting it, talking to it on its lifeline, outliving it."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from rankless.config.environment import parent_environment
from rankless.config.run_config import RunConfig
from rankless.config.worker_config import HostConfig, WorkerLaunch
from rankless.launch.supervisor.fork_server_pool_client import ForkServerPoolClient
from rankless.records.channel import open_channel
from rankless.runtime.process_tree import adopt_orphans, descendants, end_descendants
from rankless.runtime.python_command import python_command


@dataclass(frozen=True, kw_only=True)
class InheritedSockets:
    """Sockets that the parent inherits."""

    store: socket.socket | None = None
    """On which rank 0 will serve."""
    orders: socket.socket | None = None
    """On which further workers are ordered."""


class ForkServerClient:
    """The living parent of a run's workers.

    When the agent ends, however it does, its end of the lifeline closes, and the parent ends all workers.
    """

    def __init__(
        self,
        config: RunConfig,
        workers: Sequence[WorkerLaunch],
        *,
        log_path: str,
        handed: InheritedSockets,
        other_hosts: Sequence[str] = (),
        fork_server: ForkServerPoolClient | None = None,
    ) -> None:
        self._spared = descendants()
        self._control, control_end = socket.socketpair()
        self.records, records_end = open_channel()
        self.records.setblocking(False)
        host_plan = HostConfig(
            program=config.program,
            warm=config.warm,
            workers=tuple(workers),
            other_hosts=tuple(other_hosts),
            control_descriptor=control_end.fileno(),
            records_descriptor=records_end.fileno(),
            store_descriptor=None if handed.store is None else handed.store.fileno(),
            launches_descriptor=None if handed.orders is None else handed.orders.fileno(),
        )
        adopt_orphans()  # if the parent itself is killed, its workers' children come to the agent
        with open(log_path, "wb") as log, control_end, records_end:
            forked = None if fork_server is None else fork_server.fork(host_plan, log)
            self._process = forked or _started(config, host_plan, log)

    @property
    def process_id(self) -> int:
        """The parent's own."""
        return self._process.pid

    def tell(self, word: bytes) -> None:
        """Say one of the lifeline's words."""
        with contextlib.suppress(OSError):
            self._control.send(word)

    def poll(self) -> int | None:
        """The parent's exit code, or None while it lives."""
        return self._process.poll()

    def wake(self) -> None:
        """Have it go on if somebody has stopped it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGCONT)

    def close(self, *, patience_seconds: float) -> None:
        """See to it that nothing is left: the parent ends its workers, the agent what is left then."""
        self._control.close()
        deadline = time.monotonic() + patience_seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            self.wake()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        end_descendants(deadline_seconds=5, spare=self._spared)
        adopt_orphans(False)
        self.records.close()


def _started(config: RunConfig, host_plan: HostConfig, log: BinaryIO) -> subprocess.Popen[bytes]:
    """A warm parent that imports for itself."""
    process = subprocess.Popen(
        python_command("rankless.runtime.fork_server"),
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=parent_environment(config),
        pass_fds=host_plan.descriptors(),
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(msgspec.json.encode(host_plan))
    return process
