"""An agent's facts about its run in progress: where each process is, and where its figures are."""

from typing import Literal

import msgspec

LIVE_RUN_NAME = "rankless-live-run"
"""The name of the file in memory that has the record of a run."""
LAYOUT = 2
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


class LiveProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the run beside its workers."""

    role: str
    index: int
    address: str
    log_file: str
    process_id: int
    stage: ProcessStage
    restarts: int
    copy_of: int | None = None
    """The process of which it is the copy; None if it is none."""
    page: int | None = None
    """The agent's descriptor of its status page; None if it has none."""


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
    process_count: int
    """The number of processes beside the workers, of all hosts."""
    processes: tuple[LiveProcess, ...] = ()
    """None before they have started, nor once they have ended."""
    lost_hosts: tuple[str, ...] = ()
    """The names of the lost hosts, without which the run continues."""
