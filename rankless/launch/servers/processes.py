"""The processes of a run's servers: it starts them, waits until they serve, notices their ends, and ends them."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rankless.config.environment import WORKER_PLAN
from rankless.config.servers import ServerConfig, server_environment
from rankless.errors import LaunchError
from rankless.launch.rendezvous.leader import RendezvousInterrupted
from rankless.launch.servers.server_configs import ServerLaunch
from rankless.launch.signals import Interrupts
from rankless.records.events import NO_RANK, ServerExited
from rankless.runtime.process_tree import delayed_interrupts, send_signal
from rankless.runtime.subprocess_command import module_command

SERVER_MODULE = "rankless.parameter_server.servers.process"
START_SECONDS = 60.0
"""How long servers may take until they serve. They take less than a second on an idle host."""
STOP_GRACE_SECONDS = 3.0
"""How long servers may take to end after SIGTERM."""
MAX_READY_BYTES = 4096
_LOG_LINES = 10
_MAX_LOG_BYTES = 4000


@dataclass(frozen=True, kw_only=True)
class ServerRow:
    """What the table at the start shows of one server."""

    index: int
    process_id: int
    address: str
    log_file: str


@dataclass(kw_only=True)
class _ServerProcess:
    launch: ServerLaunch
    process: subprocess.Popen[bytes]
    ready: int
    """The end of the pipe from which its first line is read; it does not block."""
    received: bytes = b""
    is_ready: bool = False
    is_reported: bool = False

    @property
    def index(self) -> int:
        return self.launch.config.index

    def read(self) -> bool:
        """Read what has arrived. Returns False at the end of the pipe."""
        data = os.read(self.ready, MAX_READY_BYTES)
        self.received += data
        self.is_ready = self.received.startswith(b"ready ") and self.received.endswith(b"\n")
        return bool(data) and len(self.received) < MAX_READY_BYTES


class ServerProcesses:
    """The servers of a run, which end when this process ends. Without servers it does nothing.

    Args:
        launches: The servers.
    """

    def __init__(self, launches: Sequence[ServerLaunch]) -> None:
        self._launches = launches
        self._servers: list[_ServerProcess] = []

    def start(self, interrupts: Interrupts) -> None:
        """Start all servers, and wait until they serve.

        Raises `LaunchError` if one does not, and `RendezvousInterrupted` on a signal. No server is alive then.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            for launch in self._launches:
                self._servers.append(_start_process(launch))
            if self._servers:
                self._wait_until_ready(interrupts)
            stack.pop_all()

    def list_rows(self) -> list[ServerRow]:
        """Return the rows of the table of servers."""
        return [
            ServerRow(
                index=each.index,
                process_id=each.process.pid,
                address=each.launch.config.address,
                log_file=os.path.relpath(each.launch.log_file),
            )
            for each in self._servers
        ]

    def take_ended(self) -> list[ServerExited]:
        """Return a record of each server that has ended since the last call."""
        ended = [each for each in self._servers if not each.is_reported and each.process.poll() is not None]
        for each in ended:
            each.is_reported = True
        return [
            ServerExited(
                rank=NO_RANK, time_ns=time.monotonic_ns(), server=each.index, exit_code=each.process.returncode
            )
            for each in ended
        ]

    def close(self) -> None:
        """End all servers: by SIGTERM and, after a grace period, by SIGKILL."""
        deadline = time.monotonic() + STOP_GRACE_SECONDS
        running = [each.process for each in self._servers if each.process.poll() is None]
        for process in running:
            send_signal(process.pid, signal.SIGTERM)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in running:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # a server leads its own group
                process.wait()
        for each in self._servers:
            os.close(each.ready)
        self._servers = []

    def _wait_until_ready(self, interrupts: Interrupts) -> None:
        deadline = time.monotonic() + START_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(interrupts, selectors.EVENT_READ)
            for each in self._servers:
                selector.register(each.ready, selectors.EVENT_READ, each)
            while not all(each.is_ready for each in self._servers):
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    if key.data is None:
                        _raise_interrupt(interrupts)
                    elif not (key.data.read() or key.data.is_ready):
                        raise _make_start_error(key.data, _describe_end(key.data.process))
                    elif key.data.is_ready:
                        selector.unregister(key.fd)
                waiting = next((each for each in self._servers if not each.is_ready), None)
                if waiting is not None and time.monotonic() >= deadline:
                    raise _make_start_error(waiting, f"it has not been ready for {START_SECONDS:g} s")


def _start_process(launch: ServerLaunch) -> _ServerProcess:
    ready, ready_end = os.pipe()
    os.set_blocking(ready, False)
    config = msgspec.structs.replace(launch.config, ready_descriptor=ready_end)
    try:
        with open(launch.log_file, "wb") as log, delayed_interrupts():
            process = subprocess.Popen(
                module_command(SERVER_MODULE),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_make_environment(config, launch.variables),
                pass_fds=(ready_end,),
                start_new_session=True,
            )
    finally:
        os.close(ready_end)
    return _ServerProcess(launch=launch, process=process, ready=ready)


def _make_environment(config: ServerConfig, variables: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of a server's process, which uses no GPU and is no worker."""
    merged = {**server_environment(config), **variables, "CUDA_VISIBLE_DEVICES": "", WORKER_PLAN: None}
    return {name: value for name, value in merged.items() if value is not None}


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


def _make_start_error(server: _ServerProcess, found: str) -> LaunchError:
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
