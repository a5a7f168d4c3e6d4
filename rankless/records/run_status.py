"""The status of a run, as `rankless status` shows it: of one in progress, or of one that has ended."""

from typing import Literal

import msgspec

from rankless.records.events import SlowRank
from rankless.records.server_traffic_counters import ServerActivity

StatusOutcome = Literal["running", "succeeded", "failed", "interrupted", "preempted", "killed", "unknown"]
WorkerState = Literal["starting", "computes", "waits", "idle", "stopped", "debugged", "ended", "elsewhere"]
ServerState = Literal["starting", "serves", "restarting", "stopped", "debugged", "ended"]


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker."""

    rank: int
    host: str
    """The name of its host; "" if the run has one host."""
    device: str
    log_file: str
    process_id: int | None
    """None if it has not started, or if the run has ended."""
    state: WorkerState
    """`waits`: for other ranks, in a collective or a request to servers. `idle`: it does not run, for another reason.
    `elsewhere`: on another host, where `rankless status` shows the rest."""
    exit_code: int | None = None
    """Negative for a signal; None while it runs, or if unknown."""
    steps: int | None = None
    """Steps of its optimizers; None if unknown."""
    steps_per_second: float | None = None
    """Over the last steps, at most 10 s; 0 if it makes none any more. None before the second step."""
    seconds_since_step: float | None = None
    """None before the first step."""
    memory_bytes: int | None = None
    """The resident set of its process; at its end the largest that it had."""
    cpu_percent: float | None = None
    """Of one core, during the reading."""
    operation: str = ""
    """The collective or request in which it waits, like "all_reduce"; "" in none."""
    place: str = ""
    """The innermost line of the script, like "load() at data.py:12, called from train.py:20"; "" if unknown."""


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One process beside the workers."""

    role: str
    """What the process is called; its number follows."""
    index: int
    address: str
    log_file: str
    process_id: int
    state: ServerState
    restarts: int
    """How often it was started again after it had died."""
    copy_of: int | None = None
    """The server of which it is the copy; None if it is none."""
    memory_bytes: int | None = None
    """The resident set of its process."""
    cpu_percent: float | None = None
    """Of one core, during the reading."""
    transactions_per_second: float | None = None
    """This and the other rates are over the time between two readings; None before the second one."""
    requests_per_second: float | None = None
    pulled_rows_per_second: float | None = None
    pulled_bytes_per_second: float | None = None
    pushed_rows_per_second: float | None = None
    pushed_bytes_per_second: float | None = None
    activity: ServerActivity | None = None
    """What the server itself counts; None if it has published nothing yet."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run, at the time of the call."""

    run_id: str
    log_folder: str
    outcome: StatusOutcome
    """`killed`: the agent of the run is gone and has left no verdict. `unknown`: this host cannot tell; the verdict has
    the reason."""
    verdict: str
    """How it ended, as a sentence; "" while it is in progress."""
    exit_code: int | None
    """The exit code of its command; None while it is in progress, or if unknown."""
    started: str
    """Date and time in UTC, in the format of ISO 8601."""
    seconds: float | None
    """For how long it has been running, or ran; None if unknown."""
    agent_process_id: int | None
    """The agent of this host; None if it has ended."""
    host: str
    """The name of this host in the run; "" if the run has one host."""
    worker_count: int
    """Of all hosts."""
    server_count: int
    """Processes beside the workers, of all hosts."""
    process_counts: dict[str, int]
    """The same by what the processes are called, such as "server"."""
    steps: int | None
    """Calls of the train job that is called most often; without jobs, steps of rank 0's optimizers, or on another host
    than rank 0's those of its first rank. None if unknown."""
    samples_per_second: float | None
    """Samples of all ranks over the last seconds, or of an ended run on average; None without a `rankless.loader`."""
    workers: tuple[WorkerReport, ...]
    servers: tuple[ServerReport, ...]
    """Those of a run in progress."""
    lost_hosts: tuple[str, ...] = ()
    """The names of the lost hosts, without which the run continued."""
    slow_ranks: tuple[SlowRank, ...] = ()
    """Those of a run in progress, of all hosts. Only host 0 knows them."""
