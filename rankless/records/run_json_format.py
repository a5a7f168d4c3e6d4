"""The summary of a run: what `run.json` in its log folder has, and what `rankless run --json` writes."""

from collections.abc import Iterable
from typing import Literal

import msgspec

OLDER_FIELDS_ROLE = "server"
"""The role for which `servers` and the fields like it, which are older than roles, repeat what `processes` says."""
Outcome = Literal["running", "succeeded", "failed", "interrupted", "preempted"]


class RunFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The root cause of a failure."""

    rank: int | None
    """None if a process beside the workers is the root cause, or a host that has no workers."""
    role: str = ""
    """What the process beside the workers is called that is the root cause, such as "server"; "" if none is."""
    number: int | None = None
    """The number of that process; None if none is the root cause."""
    server: int | None = None
    """The server that is the root cause; None if none is."""
    host: str
    """The name of the host of the rank or process, or of the host that was lost; "" if the job has one host."""
    error: str
    """What happened, like "raised ValueError: no data"."""
    line: str
    """File and line of the script, like "train.py:33", or "" if unknown."""


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a run."""

    rank: int
    host: str
    device: str
    log_file: str
    exit_code: int | None = None
    """Negative for a signal; None while the rank runs, or if its end is not known."""
    peak_memory_bytes: int | None = None
    """The largest resident set of its process, or of one of its child processes if that is larger."""
    peak_gpu_memory_bytes: int | None = None
    """The most that PyTorch has allocated on its GPU; None without a GPU, or after a signal."""
    cut: str | None = None
    """Where it was when it was killed, because it had not ended in time after a signal to the run; else None."""


class RoleSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of one role of a run, of all hosts."""

    role: str
    """What one of them is called, such as "server"."""
    count: int
    """Their number, with copies."""
    replicas: int = 0
    """How many copies each process has."""
    restarts: tuple[int, ...] = ()
    """How often each was started again after it had died, in their order."""
    lost: tuple[int, ...] = ()
    """The numbers of the lost ones, without which the run continued."""


class AgentProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The process that supervises a run on one host, and where it has the record for `rankless status`."""

    process_id: int
    start_ticks: int
    """Clock ticks from the start of the host to that of the process: a later process with the same id has more."""
    host: str
    """The name of the host."""
    system: str
    """A start of that host, and a namespace of process ids on it, in which the process id is valid."""
    descriptor: int
    """The process's descriptor of the record."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run, from its start. What is known only at its end is None until then."""

    command_line: tuple[str, ...]
    """The whole command line."""
    workers: int
    """The number of workers, of all hosts together."""
    processes: tuple[RoleSummary, ...] = ()
    """The processes beside the workers, by role."""
    servers: int = 0
    """The number of servers, with copies."""
    replicas: int = 0
    """How many copies each server has."""
    lost_servers: tuple[int, ...] = ()
    """The lost servers whose tables other servers have."""
    lost_hosts: tuple[str, ...] = ()
    """The names of the lost hosts, without which the run continued."""
    server_restarts: tuple[int, ...] = ()
    """How often each server was started again after it had died, in their order."""
    lost_workers: int = 0
    """How many workers were killed while the others continued."""
    replaced_workers: int = 0
    """How many of them were replaced by a copy of another one."""
    torch: str | None
    """The version of PyTorch; None if it is not installed."""
    python: str
    """The version of Python."""
    log_folder: str
    """The folder of the log files on this host."""
    started: str
    """Date and time in UTC, in the format of ISO 8601."""
    outcome: Outcome = "running"
    verdict: str = ""
    """The outcome as a sentence."""
    exit_code: int | None = None
    """The exit code of the command."""
    failure: RunFailure | None = None
    """None unless the outcome is "failed"."""
    seconds: float | None = None
    """From the start of the run to the end of its last worker."""
    steps: int | None = None
    """Calls of the train job that is called most often; without jobs, steps of rank 0's optimizers. None if unknown."""
    resumed_step: int | None = None
    """The step of the first checkpoint of `rankless.checkpoints` that was loaded. None if there was none."""
    samples_per_second: float | None = None
    """Samples of all ranks per second, without the steps that captured a job; None without a `rankless.loader`."""
    ranks: tuple[RankSummary, ...] = ()
    agent: AgentProcess | None = None
    """None once the run has ended, and outside Linux."""


def with_processes(summary: RunSummary, processes: Iterable[RoleSummary]) -> RunSummary:
    """Return a summary with these processes, and with those of `OLDER_FIELDS_ROLE` in the older fields too."""
    known = tuple(processes)
    older = next((each for each in known if each.role == OLDER_FIELDS_ROLE), RoleSummary(role="", count=0))
    return msgspec.structs.replace(
        summary,
        processes=known,
        servers=older.count,
        replicas=older.replicas,
        server_restarts=older.restarts,
        lost_servers=older.lost,
    )


class RunProgram(msgspec.Struct, frozen=True, kw_only=True):
    """What the first fields of such a file say about the program."""

    script: str | None = None
    arguments: tuple[str, ...] = ()
    seed: int | None = None


def decode_run_summary(data: bytes) -> RunSummary:
    """Return the summary in such a file. Raises `msgspec.ValidationError` for other content."""
    return msgspec.json.decode(data, type=RunSummary)
