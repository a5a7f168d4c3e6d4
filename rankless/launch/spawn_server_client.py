"""The caller's side of the server of `rankless.spawn`, which stays between calls, and of the processes it forks."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading

from rankless.config.environment import snapshot, spawn_server_environment
from rankless.config.import_time_variables import read_at_start
from rankless.runtime.fork_server_protocol import ask_for_process, open_current_folder, receive_number, receive_ready
from rankless.runtime.subprocess_command import python_command

IMPORT_TIMEOUT_SECONDS = 120.0


class ForkedProcess:
    """A process that the server has forked, with the part of `subprocess.Popen` that `Spawned` needs."""

    def __init__(self, process_id: int, status: socket.socket) -> None:
        self.pid = process_id
        self._status: socket.socket | None = status
        self._exit_code: int | None = None
        status.setblocking(False)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self._status is not None:
            try:
                status = receive_number(self._status)
            except BlockingIOError:
                return None
            # A server that is gone has taken its processes with it.
            self._exit_code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
            self._status.close()
            self._status = None
        return self._exit_code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises `subprocess.TimeoutExpired`."""
        if self._status is not None:
            select.select([self._status], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class SpawnServerClient:
    """A server of `rankless.spawn` as its caller sees it. It starts with the first process that is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._caller: int | None = None
        self._read_at_start: dict[str, str] = {}
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._is_ready = self._cannot_fork = False

    def start_process(self, channel: socket.socket, *, output: int, errors: int) -> ForkedProcess | None:
        """Start a process with this end of its channel, or return None if this system cannot fork it."""
        with self._lock:
            for _attempt in range(2):  # a server that was killed is replaced
                control = self._ready_server()
                if control is None:
                    return None
                ours, theirs = socket.socketpair()
                with contextlib.suppress(OSError), theirs, open_current_folder() as folder:
                    ask_for_process(
                        control,
                        channel=channel.fileno(),
                        status=theirs.fileno(),
                        folder=folder,
                        output=output,
                        errors=errors,
                    )
                process_id = receive_number(ours)
                if process_id is not None:
                    return ForkedProcess(process_id, ours)
                ours.close()
                self._release()
        return None

    def _ready_server(self) -> socket.socket | None:
        """Return the socket to a server that has imported torch in this environment; start one if there is none."""
        if self._caller != os.getpid() or self._read_at_start != read_at_start(snapshot()):
            self._release()
            self._cannot_fork = not hasattr(os, "pidfd_open")
        if self._cannot_fork:
            return None
        if self._control is None:
            self._start()
        control = self._control
        assert control is not None
        if not self._is_ready:
            has_answered = bool(select.select([control], [], [], IMPORT_TIMEOUT_SECONDS)[0])
            self._is_ready = has_answered and receive_ready(control)
        if not self._is_ready:
            self._release()
            self._cannot_fork = True
        return self._control

    def _start(self) -> None:
        self._control, end = socket.socketpair()
        self._caller, self._read_at_start = os.getpid(), read_at_start(snapshot())
        with end:
            command = [*python_command("rankless.runtime.spawn_server"), str(end.fileno()), str(os.getpid())]
            self._server = subprocess.Popen(
                command,
                env=spawn_server_environment(),
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _release(self) -> None:
        """Ask this server no more. It ends by itself when the last of its processes has ended."""
        if self._control is not None:
            self._control.close()
        self._control = self._server = None
        self._is_ready = False
