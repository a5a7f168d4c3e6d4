"""The agent's side of the fork server that starts a run's workers: it starts it, sends commands and ends it.

A pool, which has imported torch, can fork the fork server of each run.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import BinaryIO, Protocol

from rankless.config.environment import parent_environment
from rankless.config.process_configs import ForkServerPoolConfig, HostConfig, WorkerLaunch
from rankless.config.program_source_files import names_rankless
from rankless.config.run_config import RunConfig
from rankless.records.encoding import encode_json
from rankless.records.events import open_channel
from rankless.records.private_files import private_opener
from rankless.runtime.fork_and_spawn_server_messages import (
    MAX_DESCRIPTORS,
    open_current_folder,
    receive_process_id,
    receive_ready,
    send_host_config,
)
from rankless.runtime.linux_process_control import adopt_orphans, delayed_interrupts, descendants, end_descendants
from rankless.runtime.subprocess_command import python_command


class WorkerParent(Protocol):
    """The process that starts the workers of a host, as the supervisor sees it."""

    records: socket.socket
    """From it the records of workers are read. It does not block."""

    @property
    def process_id(self) -> int:
        """The id of the process."""
        ...

    def poll(self) -> int | None:
        """Return the exit code of the process, or None while it runs."""
        ...

    def send(self, command: bytes) -> None:
        """Send a command of `runtime.fork_and_spawn_server_messages`."""
        ...

    def wake(self) -> None:
        """Continue the process if a signal has stopped it."""
        ...

    def close(self, *, timeout_seconds: float, spare: frozenset[int] = frozenset()) -> None:
        """End all processes of the run but those in `spare`."""
        ...


class NoWorkers:
    """Stands for the parent of workers on a host that has none: it has ended in order, and no record arrives."""

    def __init__(self) -> None:
        self.records, self._writer = open_channel()
        self.records.setblocking(False)

    @property
    def process_id(self) -> int:
        """The id of this process, which lives as long as the run."""
        return os.getpid()

    def poll(self) -> int:
        """Return 0: no worker is left."""
        return 0

    def send(self, command: bytes) -> None:
        """Do nothing."""

    def wake(self) -> None:
        """Do nothing."""

    def close(self, *, timeout_seconds: float, spare: frozenset[int] = frozenset()) -> None:  # noqa: ARG002  # the protocol's signature
        """Close the channel. There is no process to end."""
        self.records.close()
        self._writer.close()


IMPORT_TIMEOUT_SECONDS = 120.0
"""A pool that has not imported by then is ended, and the run imports torch itself."""
FORK_TIMEOUT_SECONDS = 10.0
"""Two forks take 20 ms. A pool that has not answered by then is ended."""


class Readable(Protocol):
    """An object that `select` can wait for."""

    def fileno(self) -> int:
        """Return the descriptor."""


class AdoptedProcess:
    """A child that another process has forked, with the interface of `subprocess.Popen`."""

    def __init__(self, process_id: int) -> None:
        self.pid = process_id
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self._exit_code is None:
            try:
                process_id, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the agent has reaped it with its other descendants
                process_id, status = self.pid, signal.SIGKILL
            if process_id:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises `subprocess.TimeoutExpired`."""
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                select.select([descriptor], [], [], timeout)
            finally:
                os.close(descriptor)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def kill(self) -> None:
        """Kill the process."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServerPoolClient:
    """A fork server pool, which starts with the first run that can use it.

    As a context manager it ends the pool's process at the exit.
    """

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
        """The id of the pool's process, or None if it does not run."""
        return None if self._process is None else self._process.pid

    def is_ready(self, config: RunConfig, *, until: Readable) -> bool:
        """Return whether the pool can fork this run's fork server.

        Waits until the pool has imported torch, the timeout is over, or `until` is readable.
        """
        # Modules of the user's choice would stay in the pool: a run that preloads some has a fork server of its own.
        if not config.request.warm or config.preload or not hasattr(os, "pidfd_open"):
            return False
        environment, with_jobs = parent_environment(config), names_rankless(config.program) or config.view.is_logical
        if self._environment is None:
            self._environment, self._has_jobs = environment, with_jobs
            self._start(environment, with_jobs=with_jobs)
        # torch reads the environment when it is imported. A pool that has imported jobs also serves programs without.
        if self._connection is None or self._environment != environment or with_jobs > self._has_jobs:
            return False
        if not self._is_ready:
            readable, _, _ = select.select([self._connection, until], [], [], IMPORT_TIMEOUT_SECONDS)
            self._is_ready = self._connection in readable and receive_ready(self._connection)
        if not self._is_ready:
            self.close()
        return self._is_ready

    def fork(self, config: HostConfig, log: BinaryIO) -> AdoptedProcess | None:
        """Fork a fork server with this config, or return None if the pool is gone.

        The new process is a child of this one, because this process adopts orphans.
        """
        inherited = config.descriptors()
        if self._connection is None or len(inherited) > MAX_DESCRIPTORS - 2:
            return None
        process_id = None
        with contextlib.suppress(OSError), open_current_folder() as folder:
            send_host_config(self._connection, config, [folder, log.fileno(), *inherited])
            self._connection.settimeout(FORK_TIMEOUT_SECONDS)
            process_id = receive_process_id(self._connection)
        if process_id is None:
            self._end()
            process_id = receive_process_id(self._connection)  # a slow pool may have forked after the timeout
            self.close()
        return None if process_id is None else AdoptedProcess(process_id)

    def close(self) -> None:
        """Kill the pool's process. It has no children, and nothing to clean up."""
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
        with end, delayed_interrupts():
            self._process = subprocess.Popen(
                python_command("rankless.runtime.fork_server_pool"),
                stdin=subprocess.PIPE,
                # If the pool fails, the run starts its own fork server, which fails likewise and has a log.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[end.fileno()],
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(encode_json(config))


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
            warm=config.request.warm,
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
        """Send a command of `runtime.fork_and_spawn_server_messages`. Does nothing if the fork server is gone."""
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
