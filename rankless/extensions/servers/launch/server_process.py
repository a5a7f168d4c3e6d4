"""One server of a run: the memory that it keeps, and the processes that serve with it, one after the other.

`make_server_launches` says with which configuration, variables and log file each server starts.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from rankless.config.environment import WORKER_PLAN
from rankless.config.run_config import AgreedJobConfig
from rankless.extensions.servers.config import NAME, SERVER_ROLE, ServerConfig, ServersConfig, server_environment
from rankless.launch.launcher_profile import LauncherProfile
from rankless.launch.signal_reader import name_signal
from rankless.records.live_run import ProcessStage
from rankless.records.number_formatting import format_seconds
from rankless.records.private_files import private_opener
from rankless.records.server_traffic_counters import SERVER_PAGE_BYTES, SERVER_PAGE_NAME
from rankless.records.shared_record import open_shared_file
from rankless.runtime.linux_process_control import delayed_interrupts
from rankless.runtime.subprocess_command import module_command


@dataclass(frozen=True, kw_only=True)
class ServerLaunch:
    """A server to start."""

    config: ServerConfig
    variables: Mapping[str, str | None]
    """The launcher's environment variables; None removes one."""
    log_file: str


def make_server_launches(
    profile: LauncherProfile, start: AgreedJobConfig, servers: ServersConfig, *, folder: str, host_index: int = 0
) -> list[ServerLaunch]:
    """Return the servers of a host, with log files in its `folder`."""
    agreed = start.roles[NAME]
    configs = [
        ServerConfig(
            index=index,
            server_count=servers.part_count,
            replicas=servers.replicas,
            worker_count=start.world_size,
            address=servers.addresses[index],
            token=servers.token,
            run_id=start.run_id,
            encrypted=servers.encrypted,
            mode=servers.mode,
            staleness=servers.staleness,
        )
        for index in agreed.on_host(host_index)
    ]
    return [
        ServerLaunch(
            config=each,
            variables=profile.process_environment(agreed, each.index, start),
            log_file=os.path.abspath(profile.process_log_file(folder, SERVER_ROLE, each.index)),
        )
        for each in configs
    ]


SERVER_MODULE = "rankless.extensions.servers.service.process"
MAX_READY_BYTES = 4096
_IPC = "ipc://"


class ServerPhase(Enum):
    """The phases of a server. A server that serves or starts may die; it then starts again, or has ended."""

    STARTING = "starting"
    SERVING = "serving"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Outage:
    """The time from the death of a server's process until another one serves."""

    exit_code: int
    """Negative for a signal, as in `subprocess`."""
    since: float
    first_incarnation: int
    """The first process that was started in it."""


class ServerProcess:
    """A server, whose first process starts at once.

    Its memory is a file without a name. It is open in this process as long as the run lasts, and in the server's.

    Args:
        launch: The server to start.
    """

    def __init__(self, launch: ServerLaunch) -> None:
        self.launch = launch
        self.incarnation = 0
        self.is_durable = False
        """Whether another process can continue with the memory of its first one."""
        self.outage: Outage | None = None
        self._memory: int | None = None
        if hasattr(os, "memfd_create"):
            self._memory = os.memfd_create(f"rankless-server-{self.index}", os.MFD_CLOEXEC)
        self.status_descriptor = open_shared_file(SERVER_PAGE_NAME, SERVER_PAGE_BYTES)
        """A page in which each process of the server publishes what it does; None outside Linux."""
        self._ready: int | None = None
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._start()
            stack.pop_all()

    @property
    def index(self) -> int:
        """The server's index among those of the run."""
        return self.launch.config.index

    @property
    def stage(self) -> ProcessStage:
        """What the server does, for people."""
        if self.phase is ServerPhase.ENDED:
            return "ended"
        if self.outage is not None:
            return "restarting"
        return "serves" if self.phase is ServerPhase.SERVING else "starting"

    @property
    def ready_descriptor(self) -> int:
        """The end of the pipe from which the process's first line is read; it does not block."""
        assert self._ready is not None
        return self._ready

    def start_again(self, exit_code: int) -> None:
        """Start another process at the same address after one has ended. Does not wait until it serves.

        Raises OSError if the system starts no process.
        """
        self.incarnation += 1
        if self.outage is None:
            self.outage = Outage(exit_code=exit_code, since=time.monotonic(), first_incarnation=self.incarnation)
        address = self.launch.config.address
        if address.startswith(_IPC):  # the system keeps the socket of a process that was killed
            Path(address.removeprefix(_IPC)).unlink(missing_ok=True)
        self._start()

    def read_ready_line(self) -> bool:
        """Read what the process has written, and enter the phase SERVING after its line.

        Returns False at the end of the pipe.
        """
        try:
            data = os.read(self.ready_descriptor, MAX_READY_BYTES)
        except BlockingIOError:
            return True
        self._received += data
        if self._received.startswith(b"ready ") and self._received.endswith(b"\n"):
            self.phase = ServerPhase.SERVING
            self.is_durable = self._received.endswith(b" durable\n")
        return bool(data) and len(self._received) < MAX_READY_BYTES

    def end_outage(self) -> str:
        """Return a line about the outage that has just ended, and append it to the server's log file."""
        outage, self.outage = self.outage, None
        assert outage is not None
        code, attempt = outage.exit_code, self.incarnation - outage.first_incarnation + 1
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {name_signal(-code)}"
        seconds = format_seconds(round(time.monotonic() - outage.since, 2))
        text = f"server {self.index} {how}; started again in {seconds}"
        text += f", at attempt {attempt}" if attempt > 1 else ""
        with (
            contextlib.suppress(OSError),
            open(self.launch.log_file, "ab", opener=private_opener) as log,
        ):  # a full disk ends no run
            log.write(f"rankless: {text}\n".encode(errors="backslashreplace"))
        return text

    def kill(self) -> None:
        """Kill the process and its children. Does not wait for their end."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # a server leads its own group

    def close(self) -> None:
        """Release the memory, the status page and the pipe."""
        for descriptor in (self._memory, self.status_descriptor, self._ready):
            if descriptor is not None:
                os.close(descriptor)
        self._memory = self.status_descriptor = self._ready = None

    def _start(self) -> None:
        if self._ready is not None:
            os.close(self._ready)
            self._ready = None
        self._ready, ready_end = os.pipe()
        os.set_blocking(self._ready, False)
        config = msgspec.structs.replace(
            self.launch.config,
            ready_descriptor=ready_end,
            memory_descriptor=self._memory,
            status_descriptor=self.status_descriptor,
            incarnation=self.incarnation,
        )
        inherited = (ready_end, self._memory, self.status_descriptor)
        try:
            # All processes append to the log file. The first one begins it.
            if self.incarnation == 0:
                open(self.launch.log_file, "wb", opener=private_opener).close()
            with open(self.launch.log_file, "ab") as log, delayed_interrupts():
                self.process = subprocess.Popen(
                    module_command(SERVER_MODULE),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_make_environment(config, self.launch.variables),
                    pass_fds=[descriptor for descriptor in inherited if descriptor is not None],
                    start_new_session=True,
                )
        finally:
            os.close(ready_end)
        self._received = b""
        self.phase = ServerPhase.STARTING
        self.started_at = time.monotonic()


def _make_environment(config: ServerConfig, variables: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of a server's process, which uses no GPU and is no worker."""
    merged = {**server_environment(config), **variables, "CUDA_VISIBLE_DEVICES": "", WORKER_PLAN: None}
    return {name: value for name, value in merged.items() if value is not None}
