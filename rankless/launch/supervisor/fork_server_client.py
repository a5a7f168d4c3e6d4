"""The agent's side of the fork server that starts a run's workers: it starts it, sends commands and ends it."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import BinaryIO

from rankless.config.environment import parent_environment
from rankless.config.run_config import RunConfig
from rankless.config.worker_config import HostConfig, WorkerLaunch
from rankless.launch.supervisor.fork_server_pool_client import ForkServerPoolClient
from rankless.records.access.private_files import private_opener
from rankless.records.channel import open_channel
from rankless.records.encoding import encode_json
from rankless.runtime.process_tree import adopt_orphans, delayed_interrupts, descendants, end_descendants
from rankless.runtime.subprocess_command import python_command


class ForkServerClient:
    """The fork server of a run's workers.

    When the agent ends for any reason, its end of the control socket closes, and the fork server ends all workers.
    """

    def __init__(
        self,
        config: RunConfig,
        workers: Sequence[WorkerLaunch],
        *,
        log_path: str,
        launches: socket.socket | None = None,
        other_hosts: Sequence[str] = (),
        pool: ForkServerPoolClient | None = None,
    ) -> None:
        self._spared = descendants()
        self._control, control_end = socket.socketpair()
        self.records, records_end = open_channel()
        self.records.setblocking(False)
        host_config = HostConfig(
            program=config.program,
            warm=config.warm,
            preload=config.preload,
            workers=tuple(workers),
            other_hosts=tuple(other_hosts),
            control_descriptor=control_end.fileno(),
            records_descriptor=records_end.fileno(),
            launches_descriptor=None if launches is None else launches.fileno(),
        )
        adopt_orphans()  # if the fork server is killed, the agent becomes the parent of its descendants
        with open(log_path, "wb", opener=private_opener) as log, control_end, records_end:
            forked = None if pool is None else pool.fork(host_config, log)
            self._process = forked or _start_process(config, host_config, log)

    @property
    def process_id(self) -> int:
        """The id of the fork server's process."""
        return self._process.pid

    def send(self, command: bytes) -> None:
        """Send a command of `runtime.fork_server_protocol`. Does nothing if the fork server is gone."""
        with contextlib.suppress(OSError):
            self._control.send(command)

    def poll(self) -> int | None:
        """Return the fork server's exit code, or None while it runs."""
        return self._process.poll()

    def wake(self) -> None:
        """Continue the process if a signal has stopped it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGCONT)

    def close(self, *, timeout_seconds: float, spare: frozenset[int] = frozenset()) -> None:
        """End all processes of the run. The fork server ends its workers; after the timeout the agent ends the rest.

        It spares those that were there before the fork server, and those in `spare`.
        """
        self._control.close()
        deadline = time.monotonic() + timeout_seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            self.wake()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        end_descendants(deadline_seconds=5, spare=self._spared | spare)
        adopt_orphans(False)
        self.records.close()


def _start_process(config: RunConfig, host_config: HostConfig, log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a fork server that imports torch itself."""
    with delayed_interrupts():
        process = subprocess.Popen(
            python_command("rankless.runtime.fork_server"),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=parent_environment(config),
            pass_fds=host_config.descriptors(),
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(encode_json(host_config))
    return process
