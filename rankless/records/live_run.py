"""An agent's facts about its run in progress: where each process is, and where its figures are."""

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from rankless.records.events import SlowRank
from rankless.records.run_json_format import AgentProcess

LIVE_RUN_NAME = "rankless-live-run"
"""The name of the file in memory that has the record of a run."""
LAYOUT = 4
"""Grows when this record or a page that it names changes its meaning."""

ProcessStage = Literal["starting", "serves", "restarting", "ended"]


class LiveWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of the run."""

    rank: int
    host: int
    """The index of its host."""
    device: str
    log_file: str
    page: int | None = None
    """The agent's descriptor of its status page; None for a worker of another host."""
    process_id: int | None = None
    """None before it has started."""
    has_finished: bool = False
    """Whether its script has ended; its process may stay for a while."""
    exit_code: int | None = None


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the run beside its workers, for tables, `rankless status` and the watchdog."""

    role: str
    """What the process is called in tables and messages; its number follows, as in "server 1"."""
    index: int
    """Its number among the processes of the role of all hosts."""
    process_id: int
    address: str
    log_file: str
    copy_of: int | None = None
    """The process of which it is the copy; None if it is none."""
    stage: ProcessStage = "serves"
    restarts: int = 0
    status_descriptor: int | None = None
    """The agent's descriptor of its status page; None if it has none."""

    @property
    def name(self) -> tuple[str, int]:
        """Its role and its number: no other process of the run has both."""
        return self.role, self.index

    @property
    def is_restarting(self) -> bool:
        """Whether it has died and no other process serves in its place yet."""
        return self.stage == "restarting"


class LiveRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run in progress, as the agent of one host knows it."""

    layout: int
    process_id: int
    """The agent's."""
    run_id: str
    log_folder: str
    script: str
    arguments: tuple[str, ...]
    seed: int | None
    started: str
    """Date and time in UTC, in the format of ISO 8601."""
    started_monotonic: float
    """The same in seconds of `time.monotonic`."""
    host: int
    """The index of this host."""
    host_names: tuple[str, ...]
    """The name of each host; "" if there is one."""
    workers: tuple[LiveWorker, ...]
    """Those of all hosts, in the order of their ranks."""
    process_counts: dict[str, int] = {}
    """The number of processes beside the workers, of all hosts, by what they are called."""
    processes: tuple[ProcessRow, ...] = ()
    """None before they have started, nor once they have ended."""
    lost_hosts: tuple[str, ...] = ()
    """The names of the lost hosts, without which the run continues."""
    slow_ranks: tuple[SlowRank, ...] = ()
    """Of all hosts; on host 0 only."""


def identify_agent(descriptor: int) -> AgentProcess:
    """Return what identifies this process as the agent whose record is at `descriptor`. Linux only."""
    process_id = os.getpid()
    return AgentProcess(
        process_id=process_id,
        start_ticks=read_start_ticks(process_id) or 0,
        host=platform.node(),
        system=current_system(),
        descriptor=descriptor,
    )


def is_agent_alive(agent: AgentProcess) -> bool:
    """Return whether an agent of this system is alive, and no later process has its id."""
    return read_start_ticks(agent.process_id) == agent.start_ticks


def read_start_ticks(process_id: int) -> int | None:
    """Return the clock ticks from the start of the host to that of a process; None if it is gone, or a zombie."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def current_system() -> str:
    """Return what names the present start of this host and this namespace of process ids; "" outside Linux."""
    if sys.platform != "linux":
        return ""
    parts = ["", ""]
    with suppress(OSError):
        parts[0] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        parts[1] = os.readlink("/proc/self/ns/pid")
    return " ".join(parts)
