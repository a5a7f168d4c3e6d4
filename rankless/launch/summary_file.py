"""Writes the summary of a run into its log folder: at the start what runs, at the end how it went."""

import datetime
import functools
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from rankless.config.run_config import AgreedProcesses, RunConfig
from rankless.launch.prepare_run import ReadyJob
from rankless.launch.supervisor.verdict_types import Verdict
from rankless.records.encoding import encode_json
from rankless.records.events import (
    NO_RANK,
    AnyRecord,
    CheckpointLoaded,
    Exited,
    HostLost,
    ProcessExited,
    ProcessLost,
    ScriptFinished,
    Started,
    WorkerCut,
)
from rankless.records.private_files import private_opener
from rankless.records.run_json_format import (
    OLDER_FIELDS_ROLE,
    AgentProcess,
    Outcome,
    RankSummary,
    RoleSummary,
    RunFailure,
    RunSummary,
    with_processes,
)
from rankless.records.worker_status import read_page
from rankless.version import VERSION


class SummaryFile:
    """The summary of a run, and the file in this host's log folder that holds it.

    Args:
        config: What is run.
        job: The run's hosts.
        folder: This host's log folder.
        log_file: Returns the log file of a rank.
        agent: This process; None outside Linux.
    """

    def __init__(
        self,
        config: RunConfig,
        job: ReadyJob,
        *,
        folder: str,
        log_file: Callable[[int], str],
        agent: AgentProcess | None = None,
    ) -> None:
        self._started_at = time.monotonic()
        # The fields that all results in JSON start with (rankless.cli.json_output).
        self._header: dict[str, object] = {
            "version": 1,
            "rankless": VERSION,
            "command": "run",
            "script": config.program.text,
        }
        self._header |= {"arguments": config.program.arguments, "seed": job.start.seed}
        self._path = os.path.join(folder, f"run{job.host_index or ''}.json")
        self._ranks = {each.rank: each for each in _list_ranks(config, job, log_file)}
        self._host_name = {rank: each.host for rank, each in self._ranks.items()}
        roles = job.start.roles.values()
        self._process_hosts = {each.role: [job.names[host] for host in each.hosts] for each in roles}
        self._processes = {each.role: _summarize_role(each) for each in roles}
        summary = RunSummary(
            command_line=config.request.command or tuple(sys.argv),
            workers=job.start.world_size,
            torch=torch_version(),
            python=platform.python_version(),
            log_folder=os.path.abspath(folder),
            started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            ranks=tuple(self._ranks.values()),
            agent=agent,
        )
        self.summary = with_processes(summary, self._processes.values())
        self._write()

    def receive(self, record: AnyRecord) -> None:
        """Take note of the end of a rank or of a process beside the workers."""
        if isinstance(record, ProcessExited | ProcessLost):
            self._receive_process(record)
        if isinstance(record, CheckpointLoaded) and self.summary.resumed_step is None:
            self.summary = msgspec.structs.replace(self.summary, resumed_step=record.step)
        if isinstance(record, HostLost) and record.is_covered:
            hosts = (*self.summary.lost_hosts, record.host)
            self.summary = msgspec.structs.replace(self.summary, lost_hosts=hosts)
        rank = self._ranks.get(record.rank)
        if rank is None:
            return
        if isinstance(record, Exited) and record.survivors is not None:
            self.summary = msgspec.structs.replace(self.summary, lost_workers=self.summary.lost_workers + 1)
        if isinstance(record, Started) and rank.exit_code is not None:
            rank = msgspec.structs.replace(rank, exit_code=None)
            self.summary = msgspec.structs.replace(self.summary, replaced_workers=self.summary.replaced_workers + 1)
        if isinstance(record, Exited):
            rank = msgspec.structs.replace(rank, exit_code=record.exit_code, peak_memory_bytes=record.peak_memory_bytes)
        elif isinstance(record, ScriptFinished):
            rank = msgspec.structs.replace(rank, peak_gpu_memory_bytes=record.peak_gpu_memory_bytes)
        elif isinstance(record, WorkerCut):
            rank = msgspec.structs.replace(rank, cut=record.doing)
        self._ranks[record.rank] = rank

    def _receive_process(self, record: ProcessExited | ProcessLost) -> None:
        found = self._processes[record.role]
        if isinstance(record, ProcessLost):
            found = msgspec.structs.replace(found, lost=(*found.lost, record.number))
        elif record.is_restarted:
            restarts = [count + (number == record.number) for number, count in enumerate(found.restarts)]
            found = msgspec.structs.replace(found, restarts=tuple(restarts))
        self._processes[record.role] = found
        self.summary = with_processes(self.summary, self._processes.values())

    def measure(self, pages: Sequence[int], first: int = 0) -> None:
        """Take the figures of the training from the pages of this host's workers.

        The first worker has them, which is another one if that was lost. If it is on another host, they are unknown.
        """
        seconds = time.monotonic() - self._started_at
        self.summary = msgspec.structs.replace(self.summary, seconds=seconds, ranks=tuple(self._ranks.values()))
        if first < len(pages) and 0 in self._ranks:
            page = read_page(pages[first])
            rate = page.timed_samples / page.timed_seconds if page.timed_samples and page.timed_seconds else None
            steps = page.job_steps or page.count  # a script without jobs has steps of optimizers alone
            self.summary = msgspec.structs.replace(self.summary, steps=steps, samples_per_second=rate)

    def finish(
        self, outcome: Outcome, exit_code: int, *, verdict: str, failure: Verdict | None = None, line: str = ""
    ) -> None:
        """Write how the run ended.

        `verdict` says it in a sentence. `failure` is the root cause, if it is known, and `line` its line of the script.
        """
        self.summary = msgspec.structs.replace(
            self.summary,
            outcome=outcome,
            exit_code=exit_code,
            verdict=verdict,
            failure=None if failure is None else self._describe(failure, line),
            agent=None,
        )
        self._write()

    def _describe(self, failure: Verdict, line: str) -> RunFailure:
        rank, number = failure.root_cause_rank, failure.root_cause_number
        host = failure.root_cause_host or self._host_name.get(rank, "")
        if number is not None:
            host = self._process_hosts[failure.role][number]
        return RunFailure(
            rank=None if rank == NO_RANK else rank,
            role=failure.role,
            number=number,
            server=number if failure.role == OLDER_FIELDS_ROLE else None,
            host=host,
            error=failure.headline,
            line=line,
        )

    def _write(self) -> None:
        new = f"{self._path}.new"
        with suppress(OSError):  # a full disk costs the file and never the training
            with open(new, "wb", opener=private_opener) as file:
                file.write(msgspec.json.format(encode_json(self._header | msgspec.to_builtins(self.summary))))
                file.write(b"\n")
            os.replace(new, self._path)


def _summarize_role(processes: AgreedProcesses) -> RoleSummary:
    """Return what is known at the start of the processes of a role."""
    count = len(processes.hosts)
    return RoleSummary(role=processes.role, count=count, replicas=processes.replicas, restarts=(0,) * count)


@functools.cache
def torch_version() -> str | None:
    """Return the version of the installed PyTorch, without importing it; None if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _list_ranks(config: RunConfig, job: ReadyJob, log_file: Callable[[int], str]) -> list[RankSummary]:
    """Return the ranks that this host knows: on host 0 those of all hosts, on another host its own."""
    first = job.start.first_rank(job.host_index)
    hosts = enumerate(job.devices) if job.host_index == 0 else [(job.host_index, config.devices)]
    placed = [(job.names[host] if len(job.names) > 1 else "", device) for host, row in hosts for device in row]
    return [
        RankSummary(rank=rank, host=host, device=device, log_file=os.path.abspath(log_file(rank)))
        for rank, (host, device) in enumerate(placed, start=first)
    ]
