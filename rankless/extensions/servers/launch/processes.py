"""The processes of a run's servers: it starts them, waits until they serve, starts those again that die, and ends them.

Note [servers that die]: only a server that keeps its tables in the memory that its next process inherits is started
again. The supervisor's loop calls `poll`, which never waits: workers may fail while a server starts.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from rankless.errors import LaunchError
from rankless.extensions.servers.config import CANNOT_CONTINUE, DEFAULT_SERVER_RESTARTS, SERVER_ROLE, find_original
from rankless.extensions.servers.launch.server_process import ServerLaunch, ServerPhase, ServerProcess
from rankless.launch.signal_reader import Interrupts, RendezvousInterrupted
from rankless.records.events import NO_RANK, ProcessExited, ProcessRestarted
from rankless.records.live_run import ProcessRow
from rankless.runtime.linux_process_control import descendants, send_signal

START_SECONDS = 60.0
"""How long servers may take until they serve. They take less than a second on an idle host."""
RESTART_SECONDS = 60.0
"""The same for a server that is started again."""
STOP_GRACE_SECONDS = 3.0
"""How long servers may take to end after SIGTERM."""
_POLL_SECONDS = 0.1
_LOG_LINES = 10
_MAX_LOG_BYTES = 4000


class ServerProcesses:
    """The servers of a run, which end when this process ends. Without servers it does nothing.

    Args:
        launches: The servers.
        max_restarts: How often servers that died are started again, all together.
    """

    def __init__(self, launches: Sequence[ServerLaunch], *, max_restarts: int = DEFAULT_SERVER_RESTARTS) -> None:
        self._launches = launches
        self._max_restarts = self._restarts_left = max_restarts
        self._servers: list[ServerProcess] = []

    def start(self, interrupts: Interrupts, *, on_wait: Callable[[], None] = lambda: None) -> None:
        """Start all servers, and wait until they serve. Calls `on_wait` several times a second meanwhile.

        Raises `LaunchError` if one does not, `RendezvousInterrupted` on a signal, and what `on_wait` raises. No server
        is alive then.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            for launch in self._launches:
                self._servers.append(ServerProcess(launch))
            if self._servers:
                self._wait_until_ready(interrupts, on_wait)
            stack.pop_all()

    def list_rows(self) -> list[ProcessRow]:
        """Return what each server is, at present."""
        return [
            ProcessRow(
                role=SERVER_ROLE,
                index=each.index,
                process_id=each.process.pid,
                address=each.launch.config.address,
                log_file=os.path.relpath(each.launch.log_file),
                copy_of=find_original(each.index, each.launch.config.server_count),
                stage=each.stage,
                restarts=each.incarnation,
                status_descriptor=each.status_descriptor,
            )
            for each in self._servers
        ]

    def list_process_ids(self) -> frozenset[int]:
        """Return the ids of all processes of the servers that run."""
        roots = {each.process.pid for each in self._servers if each.process.returncode is None}
        return frozenset(roots).union(*map(descendants, roots))

    def poll(self) -> list[ProcessExited | ProcessRestarted]:
        """Start servers again that have died, and return what has happened to servers since the last call."""
        records: list[ProcessExited | ProcessRestarted | None] = []
        for each in self._servers:
            if each.phase is ServerPhase.STARTING:
                records.append(_check_start(each))
            code = None if each.phase is ServerPhase.ENDED else each.process.poll()
            if code is not None:
                records.append(self._take_end(each, code))
        return [record for record in records if record is not None]

    def close(self, on_wait: Callable[[], object] = lambda: None) -> None:
        """End all servers: by SIGTERM and, after a grace period, by SIGKILL. Calls `on_wait` meanwhile."""
        deadline = time.monotonic() + STOP_GRACE_SECONDS
        running = [each.process for each in self._servers if each.process.poll() is None]
        for process in running:
            send_signal(process.pid, signal.SIGTERM)
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            on_wait()
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        for each in self._servers:
            if each.process.poll() is None:
                each.kill()
                each.process.wait()
            each.close()
        self._servers = []

    def _take_end(self, server: ServerProcess, code: int) -> ProcessExited:
        """Start the server again if that is possible. See Note [servers that die]."""
        if not server.is_durable or code in (0, CANNOT_CONTINUE) or not self._max_restarts:
            note = "" if server.outage is None else ", when it was started again"
        elif not self._restarts_left:
            note = f"; servers have been started again {self._max_restarts} times, as --server-restarts allows"
        else:
            try:
                server.start_again(code)
            except OSError as error:
                note = f", and could not be started again: {error}"
            else:
                self._restarts_left -= 1
                return _make_exit_record(server, code, is_restarted=True)
        server.phase = ServerPhase.ENDED
        return _make_exit_record(server, code, note=note)

    def _wait_until_ready(self, interrupts: Interrupts, on_wait: Callable[[], None]) -> None:
        deadline = time.monotonic() + START_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(interrupts, selectors.EVENT_READ)
            for each in self._servers:
                selector.register(each.ready_descriptor, selectors.EVENT_READ, each)
            while not all(each.phase is ServerPhase.SERVING for each in self._servers):
                on_wait()
                for key, _ in selector.select(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
                    if key.data is None:
                        _raise_interrupt(interrupts)
                    elif not key.data.read_ready_line() and key.data.phase is ServerPhase.STARTING:
                        raise _make_start_error(key.data, _describe_end(key.data.process))
                    elif key.data.phase is ServerPhase.SERVING:
                        selector.unregister(key.fd)
                waiting = next((each for each in self._servers if each.phase is ServerPhase.STARTING), None)
                if waiting is not None and time.monotonic() >= deadline:
                    raise _make_start_error(waiting, f"it has not been ready for {START_SECONDS:g} s")


def _check_start(server: ServerProcess) -> ProcessExited | ProcessRestarted | None:
    """Return what has come of a restart, or None if the server still starts."""
    server.read_ready_line()
    assert server.outage is not None
    if server.phase is ServerPhase.SERVING and server.is_durable:
        return ProcessRestarted(
            rank=NO_RANK,
            time_ns=time.monotonic_ns(),
            role=SERVER_ROLE,
            number=server.index,
            text=server.end_outage(),
        )
    if server.phase is ServerPhase.SERVING:
        note = ", and was started again without its tables"
    elif time.monotonic() >= server.started_at + RESTART_SECONDS:
        note = f", and did not serve within {RESTART_SECONDS:g} s after it was started again"
    else:
        return None
    server.kill()
    server.phase = ServerPhase.ENDED
    return _make_exit_record(server, server.outage.exit_code, note=note)


def _make_exit_record(server: ServerProcess, code: int, *, is_restarted: bool = False, note: str = "") -> ProcessExited:
    return ProcessExited(
        rank=NO_RANK,
        time_ns=time.monotonic_ns(),
        role=SERVER_ROLE,
        number=server.index,
        exit_code=code,
        is_restarted=is_restarted,
        note=note,
    )


def _raise_interrupt(interrupts: Interrupts) -> None:
    for number in interrupts.read():
        raise RendezvousInterrupted(number)


def _describe_end(process: subprocess.Popen[bytes]) -> str:
    """Describe how a server ended that has closed its pipe."""
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "it closed its pipe without that line"
    return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code} before that"


def _make_start_error(server: ServerProcess, found: str) -> LaunchError:
    path = server.launch.log_file
    log = _read_end(path)
    return LaunchError(
        expected=f"server {server.index} to serve at {server.launch.config.address}, and to write that it is ready",
        found=found + (f". The end of its log:\n{log}" if log else ", and it wrote nothing into its log"),
        fix=f"correct what its log file names: {os.path.relpath(path)}",
    )


def _read_end(path: str) -> str:
    """Return the last lines of a log file, indented."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_LOG_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-_LOG_LINES:])
