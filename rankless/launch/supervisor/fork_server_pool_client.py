"""The agent's end of a fork server: runs that follow each other get their warm parents from it."""

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import BinaryIO, Protocol

import msgspec

from rankless.config.environment import parent_environment
from rankless.config.run_config import RunConfig
from rankless.config.script_source import names_rankless
from rankless.config.worker_config import ForkServerPoolConfig, HostConfig
from rankless.runtime.python_command import python_command
from rankless.runtime.spawn_protocol import MOST_DESCRIPTORS, READY, receive_process_id, send_host_config

IMPORT_SECONDS = 120.0
"""Whoever has not imported by then is stopped, and the run imports for itself."""
FORK_SECONDS = 10.0
"""Two forks take 20 ms: who has not answered by then is stopped."""


class Readable(Protocol):
    """What can be selected on."""

    def fileno(self) -> int:
        """Its descriptor."""


class AdoptedProcess:
    """A child that another process has forked, as `subprocess.Popen` is one that this process has started."""

    def __init__(self, process_id: int) -> None:
        self.pid = process_id
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or None while it lives."""
        if self._exit_code is None:
            try:
                process_id, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # reaped with the rest of what was below the agent
                process_id, status = self.pid, signal.SIGKILL
            if process_id:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended; raises `subprocess.TimeoutExpired`."""
        if self.poll() is None:
            ended = os.pidfd_open(self.pid)
            try:
                select.select([ended], [], [], timeout)
            finally:
                os.close(ended)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServerPoolClient:
    """A fork server, started for the first run that can use it; a context manager that leaves nothing behind."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._environment: dict[str, str] | None = None
        self._has_jobs = False
        self._is_ready = False

    def __enter__(self) -> "ForkServerPoolClient":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def process_id(self) -> int | None:
        """Its own, while there is one."""
        return None if self._process is None else self._process.pid

    def is_ready(self, config: RunConfig, *, until: Readable) -> bool:
        """Whether it can fork the parent of this run's workers: waits for its imports, but not for ever, and only till
        `until` is readable.
        """
        if not config.warm or not hasattr(os, "pidfd_open"):
            return False
        environment, with_jobs = parent_environment(config), names_rankless(config.program)
        if self._environment is None:
            self._environment, self._has_jobs = environment, with_jobs
            self._start(environment, with_jobs=with_jobs)
        # What torch has read at its import stays; what jobs need is no hindrance to a program without any.
        if self._connection is None or self._environment != environment or with_jobs > self._has_jobs:
            return False
        if not self._is_ready:
            readable, _, _ = select.select([self._connection, until], [], [], IMPORT_SECONDS)
            self._is_ready = self._connection in readable and _is_said(self._connection)
        if not self._is_ready:
            self.close()
        return self._is_ready

    def fork(self, config: HostConfig, log: BinaryIO) -> AdoptedProcess | None:
        """A warm parent with this plan, a child of this process, which adopts orphans; None if the server has gone."""
        inherited = config.descriptors()
        if self._connection is None or len(inherited) > MOST_DESCRIPTORS - 2:
            return None
        number = None
        with contextlib.suppress(OSError), _opened_folder() as folder:
            send_host_config(self._connection, config, [folder, log.fileno(), *inherited])
            self._connection.settimeout(FORK_SECONDS)
            number = receive_process_id(self._connection)
        if number is None:
            self._end()
            number = receive_process_id(self._connection)  # it may have been slow, and there is one parent, not two
            self.close()
        return None if number is None else AdoptedProcess(number)

    def close(self) -> None:
        """End it: it has no children, and nothing to put away."""
        self._end()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self, environment: dict[str, str], *, with_jobs: bool) -> None:
        self._connection, end = socket.socketpair()
        config = ForkServerPoolConfig(connection_descriptor=end.fileno(), with_jobs=with_jobs)
        with end:
            self._process = subprocess.Popen(
                python_command("rankless.runtime.fork_server_pool"),
                stdin=subprocess.PIPE,
                # If it fails, the run's parent is started without it, fails likewise, and has a log.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[end.fileno()],
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(msgspec.json.encode(config))


def _is_said(connection: socket.socket) -> bool:
    try:
        return connection.recv(len(READY)) == READY
    except OSError:
        return False


@contextlib.contextmanager
def _opened_folder() -> Iterator[int]:
    """The current folder, to be handed on."""
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)
