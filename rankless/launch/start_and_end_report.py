"""What the terminal shows of a run: the table at its start and, at its end, the rank that failed and its log file."""

import importlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType

from rankless.config.process_configs import WorkerLaunch
from rankless.config.rank_awareness import describe_view
from rankless.config.run_config import RunConfig
from rankless.errors import JoinError, LaunchError
from rankless.launch.launcher_profile import WorkerLogFiles, run_folder
from rankless.launch.other_hosts_interface import Peers
from rankless.launch.prepare_run import ReadyJob
from rankless.launch.signal_reader import RendezvousInterrupted, name_signal
from rankless.launch.summary_file import SummaryFile
from rankless.launch.supervisor.start_and_end_text import (
    WorkerRow,
    format_cuts,
    format_hosts_line,
    format_process_table,
    format_processes,
    format_shared_gpus,
    format_start_line,
    format_summary,
    format_worker_table,
)
from rankless.launch.supervisor.supervisor import RunOutcome
from rankless.launch.supervisor.verdict_types import SecondaryFailure, Verdict
from rankless.records.events import PREEMPTED_EXIT_CODE, AnyRecord, ProcessRestarted, Started
from rankless.records.live_run import ProcessRow
from rankless.records.number_formatting import format_count
from rankless.records.run_json_format import AgentProcess, Outcome, RunSummary

PREEMPTED = "preempted: all workers have stopped, to be started again"


class RunReport:
    """The texts about one run on this host.

    Args:
        config: What is run.
        job: The run's hosts.
        folder: This host's log folder.
        agent: This process, for the summary; None outside Linux.
    """

    def __init__(self, config: RunConfig, job: ReadyJob, folder: str, *, agent: AgentProcess | None = None) -> None:
        self.job = job
        self._config = config
        self._profile = job.profile
        self._folder = folder
        self.summary_file = (
            SummaryFile(config, job, folder=folder, log_file=self.log_file, agent=agent)
            if self._profile.shows_summary
            else None
        )
        self.parent_log = os.path.join(folder, "parent.log" if job.host_index == 0 else f"parent{job.host_index}.log")

    def format_opening(self, lead: WorkerLaunch | None) -> str:
        """Return the first line about the job; on other hosts than host 0 about its part; or the launcher's own text.

        `lead` is this host's first worker; None on a host without workers.
        """
        config, job = self._config, self.job
        count = len(job.start.workers)
        text = self._launcher_text(lead)
        if text is not None:
            return text
        if job.host_index > 0:
            first, own = job.start.first_rank(job.host_index), job.start.workers[job.host_index]
            ranks = f"rank {first}" if own == 1 else f"ranks {first} to {first + own - 1}" if own else "no ranks"
            others = format_processes(job.start.list_processes(job.host_index))
            return (
                f"rankless: host {job.host_index + 1} of {count}, {ranks}{others}, logs in {self._folder}; "
                f"{job.names[0]} shows the training\n"
            )
        workers = job.start.world_size
        view = f"rankless: {describe_view(config.view, workers)}\n" if config.view.reason else ""
        if count == 1:
            return format_start_line(config, folder=self._folder) + view
        return format_hosts_line(config, folder=self._folder, worker_count=workers, host_count=count) + view

    def format_processes(
        self, lead: WorkerLaunch | None, process_ids: Mapping[int, int], others: Sequence[ProcessRow] = ()
    ) -> str:
        """Return the tables of all processes of the run, to follow `format_opening`; "" if this host shows none."""
        config, job = self._config, self.job
        if job.host_index > 0 or self._launcher_text(lead) is not None:
            return ""
        places = [(job.names[host], device) for host, devices in enumerate(job.devices) for device in devices]
        has_error_files = len(job.names) == 1 and self._log_files(0).error is not None
        rows = [
            WorkerRow(
                rank=rank,
                process_id=process_ids.get(rank),
                device=device,
                log_file=self.log_file(rank),
                host=host,
            )
            for rank, (host, device) in enumerate(places)
        ]
        shared = format_shared_gpus(config.devices) if len(job.names) == 1 and not has_error_files else ""
        is_several = len(job.names) > 1
        other_table = format_process_table(
            others, hosts=[self.process_host_name(row.name) for row in others] if is_several else None
        )
        return other_table + format_worker_table(rows, has_error_files=has_error_files) + shared

    def _launcher_text(self, lead: WorkerLaunch | None) -> str | None:
        return (
            None
            if lead is None
            else self._profile.opening_text(
                self._config, lead, self.job.start, folder=self._folder, first_host=self.job.names[0]
            )
        )

    @property
    def plain_process_advice(self) -> str:
        """Advice to run without the fork server; "" if the launcher has no option for it."""
        option = self._profile.plain_process_option
        return "" if option is None else f"start plain processes with {option}; "

    def host_name(self, rank: int) -> str:
        """Return the name of a rank's host; "" if the job has one host."""
        return "" if len(self.job.start.workers) == 1 else self.job.names[self.job.start.host_of(rank)]

    def log_file(self, rank: int) -> str:
        """Return the log file that has a rank's standard error."""
        files = self._log_files(rank)
        return os.path.relpath(files.error or files.output)

    def process_log_file(self, name: tuple[str, int]) -> str:
        """Return the log file of a process beside the workers, on its host, by its role and number."""
        folder = self._folder_of(self.process_host(name))
        return os.path.relpath(self._profile.process_log_file(folder, *name))

    def process_host(self, name: tuple[str, int]) -> int:
        """Return the index of the host of a process beside the workers, by its role and number."""
        role, index = name
        hosts = (each.hosts[index] for each in self.job.start.roles.values() if each.role == role)
        return next(hosts, 0)

    def process_host_name(self, name: tuple[str, int]) -> str:
        """Return the name of the host of such a process; "" if the job has one host."""
        return self.job.names[self.process_host(name)] if len(self.job.names) > 1 else ""

    def name_restarted_host(self, record: ProcessRestarted) -> str:
        """Return the text of a restart, with the name of the process's host if there are several."""
        name, host = f"{record.role} {record.number}", self.process_host_name((record.role, record.number))
        return record.text.replace(name, f"{name} on {host}", 1) if host else record.text

    def root_cause_host(self, verdict: Verdict) -> int:
        """Return the index of the host of the rank or process that caused a failure."""
        number = verdict.root_cause_number
        if number is None:
            return self.job.start.host_of(verdict.root_cause_rank)
        return self.process_host((verdict.role, number))

    def format_failure(self, verdict: Verdict, *, with_traceback: bool = True) -> str:
        """Return at most 15 lines about the rank that failed, and the launcher's own note after them."""
        rank, number = verdict.root_cause_rank, verdict.root_cause_number
        host = self.root_cause_host(verdict)
        text: str = _load_error_lines().format_failure(
            verdict,
            log_file=self.log_file(rank) if number is None else self.process_log_file((verdict.role, number)),
            host=self.job.names[host] if len(self.job.names) > 1 else "",
            report=self.report_file(host) if host > 0 else "",
            with_traceback=with_traceback,
        )
        has_ended_itself = verdict.cause not in ("host", "interrupted", "hang") and number is None
        return text + self._profile.failure_note(rank, verdict.exit_code) if has_ended_itself else text

    def format_secondary_failures(self, failures: Sequence[SecondaryFailure]) -> str:
        """Return a line for each rank that failed after the root cause; "" if the terminal shows their tracebacks."""
        if not self._profile.withholds_tracebacks:
            return ""
        if not failures:
            return ""
        named = [(self.log_file(failure.rank), failure) for failure in failures]
        return str(_load_error_lines().format_secondary_failures(named))

    @contextmanager
    def recorded_start(self) -> Iterator[None]:
        """Record in the summary that processes beside the workers do not start, if so."""
        try:
            yield
        except (JoinError, LaunchError) as error:
            if self.summary_file is not None:
                self.summary_file.finish("failed", 2, verdict=f"expected {error.expected}, found {error.found}")
            raise
        except RendezvousInterrupted as error:
            if self.summary_file is not None:
                code, verdict = 128 + error.number, f"ended by {name_signal(error.number)}"
                self.summary_file.finish("interrupted", code, verdict=verdict)
            raise

    def format_summary(self) -> str:
        """Return the last line of a run, or "" if it shall have none."""
        if self.summary_file is None or self._config.request.agent_output != "summary":
            return ""
        return format_summary(self.summary_file.summary, folder=self._folder)

    def report_file(self, host: int) -> str:
        """Return the file with the closing text of another host than host 0, which may have no terminal."""
        return os.path.relpath(os.path.join(self._folder_of(host), f"report{host}.txt"))

    def save(self, text: str) -> None:
        """Write the closing text of this host, which is not host 0, to its file."""
        with (
            suppress(OSError),
            open(self.report_file(self.job.host_index), "w", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(text)

    def read_parent_log(self) -> str:
        """Return the end of what the workers' parent wrote; delete the file if it is empty."""
        if not os.path.exists(self.parent_log):  # a host without workers has no such process
            return ""
        with open(self.parent_log, encoding="utf-8", errors="replace") as log:
            text = log.read()[-2000:].strip()
        if not text:
            with suppress(OSError):
                os.unlink(self.parent_log)
        return text

    def _folder_of(self, host: int) -> str:
        return run_folder(self._config, self._profile, self.job.start.run_id, host)

    def _log_files(self, rank: int) -> WorkerLogFiles:
        start = self.job.start
        host = start.host_of(rank)
        return self._profile.log_files(self._folder_of(host), rank, rank - start.first_rank(host))


def _load_error_lines() -> ModuleType:
    # Imported here: only a run in which something fails needs it.
    return importlib.import_module("rankless.launch.supervisor.failure_report")


def conclude(
    outcome: RunOutcome, report: RunReport, *, write: Callable[[str], None], with_traceback: bool = True
) -> int:
    """Write how the run ended here and send it to the other hosts; return the exit code.

    `with_traceback` writes the traceback of the rank that failed first too. Raises `LaunchError` if the workers' parent
    failed although no worker did.
    """
    peers = report.job.peers
    if report.job.host_index > 0:
        return _conclude_as_follower(outcome, report, peers, write=write)
    parent_text = report.read_parent_log()
    code, text = _format_outcome(outcome, report)
    parent_failed = code == 0 and outcome.fork_server_exit_code not in (0, None)
    if parent_failed:
        peers.send_job_end(
            2, ["rankless: the process that starts host 0's workers ended before them\n"] * len(report.job.names)
        )
    else:
        peers.send_job_end(code, [_text_for_host(host, outcome, report, text) for host in range(len(report.job.names))])
    _record_end(report, outcome, 2 if parent_failed else code)
    if outcome.verdict is not None:
        text = report.format_failure(outcome.verdict, with_traceback=with_traceback)
        text += report.format_secondary_failures(outcome.secondary_failures)
    summary = "" if parent_failed else report.format_summary()
    has_stopped = outcome.is_preempted or outcome.interrupted_by is not None
    write(format_cuts(outcome.cut) + (summary if summary and has_stopped else text + summary))
    if parent_failed:
        raise LaunchError(
            expected="the process that starts the workers to run until they have ended",
            found=f"it ended with {outcome.fork_server_exit_code} before them"
            + (f":\n{parent_text}" if parent_text else ""),
            fix=f"{report.plain_process_advice}if a signal ended it (negative), find out what sent it",
        )
    return code


def _format_outcome(outcome: RunOutcome, report: RunReport) -> tuple[int, str]:
    if outcome.is_preempted:
        return PREEMPTED_EXIT_CODE, f"rankless: {PREEMPTED}\n"
    if outcome.interrupted_by is not None:
        return 128 + outcome.interrupted_by, f"rankless: ended by {name_signal(outcome.interrupted_by)}\n"
    if outcome.verdict is not None:
        return outcome.verdict.exit_code, report.format_failure(outcome.verdict)
    return 0, ""


def _record_end(report: RunReport, outcome: RunOutcome, code: int) -> None:
    """Write the summary of the run into its log folder."""
    if report.summary_file is None:
        return
    if outcome.is_preempted:
        report.summary_file.finish("preempted", code, verdict=PREEMPTED)
    elif outcome.interrupted_by is not None:
        report.summary_file.finish("interrupted", code, verdict=f"ended by {name_signal(outcome.interrupted_by)}")
    elif outcome.verdict is not None:
        is_host = outcome.verdict.cause in ("host", "interrupted")
        headline = outcome.verdict.headline if is_host else f"{outcome.verdict.root_cause} {outcome.verdict.headline}"
        line = outcome.verdict.line or _load_error_lines().find_script_line(outcome.verdict.traceback)
        report.summary_file.finish("failed", code, verdict=headline, failure=outcome.verdict, line=line)
    elif code != 0:
        report.summary_file.finish("failed", code, verdict="the process that starts the workers ended before them")
    else:
        report.summary_file.finish("succeeded", code, verdict=_describe_success(report.summary_file.summary))


def _describe_success(summary: RunSummary) -> str:
    lost, text = summary.lost_workers - summary.replaced_workers, "all workers ended"
    if lost:
        text += f" but {lost}, which {'were' if lost > 1 else 'was'} killed before"
    for each in summary.processes:
        if each.lost:
            numbers = ", ".join(map(str, sorted(each.lost)))
            text += f"; without {each.role}{'s' if len(each.lost) > 1 else ''} {numbers}"
    if summary.lost_hosts:
        text += f", {'hosts' if len(summary.lost_hosts) > 1 else 'host'} {', '.join(summary.lost_hosts)} lost"
    return text


def _text_for_host(host: int, outcome: RunOutcome, report: RunReport, text: str) -> str:
    """Return what another host shows: the whole text on the host of the rank that failed, else one line."""
    verdict = outcome.verdict
    if outcome.is_preempted or not text or outcome.interrupted_by is not None or verdict is None:
        return text.replace("ended by", f"{report.job.names[0]} was stopped by") if text else ""
    if report.root_cause_host(verdict) == host:
        return text
    return f"rankless: the job was ended: {text.splitlines()[0].removeprefix('rankless: ')}\n"


def _conclude_as_follower(
    outcome: RunOutcome, report: RunReport, leader: Peers, *, write: Callable[[str], None]
) -> int:
    code, text = _format_follower_outcome(outcome, report, leader)
    if report.summary_file is not None:
        ends: dict[int, Outcome] = {0: "succeeded", PREEMPTED_EXIT_CODE: "preempted"}
        end = ends.get(code, "interrupted" if outcome.interrupted_by is not None else "failed")
        report.summary_file.finish(end, code, verdict=(text.splitlines() or ["all workers ended"])[0])
    if text:
        report.save(text)
        write(text)
    return code


def _format_follower_outcome(outcome: RunOutcome, report: RunReport, leader: Peers) -> tuple[int, str]:
    parent_text = report.read_parent_log()
    if leader.job_end is not None:
        return leader.job_end
    if outcome.interrupted_by is not None:
        return 128 + outcome.interrupted_by, f"rankless: ended by {name_signal(outcome.interrupted_by)}\n"
    text = f"rankless: the process that starts the workers wrote: {parent_text}\n" if parent_text else ""
    start, host = report.job.start, report.job.host_index
    ended = format_count(start.workers[host], "worker")
    if not start.workers[host]:  # a host of other processes says which of them ended
        counts = Counter(role for role, _ in start.list_processes(host))
        ended = " and ".join(format_count(number, role) for role, number in counts.items())
    return 1, f"{text}rankless: host 0, {report.job.names[0]}, was lost: {leader.lost_reason}; {ended} here ended\n"


LONGEST_WAIT_SECONDS = 3.0
"""Between the first worker's start and the table: other hosts may still import torch."""


class WorkerTable:
    """Waits for the workers' process ids, and writes the table once.

    Args:
        format_table: Returns the table for process ids by rank; a rank may be missing.
        write: Writes it on the terminal.
        world_size: The number of workers of the job.
    """

    def __init__(
        self, format_table: Callable[[Mapping[int, int]], str], write: Callable[[str], None], *, world_size: int
    ) -> None:
        self._format_table = format_table
        self._write = write
        self._world_size = world_size
        self._process_ids: dict[int, int] = {}
        self._first_at: float | None = None
        self.is_shown = not format_table({})

    def receive(self, record: AnyRecord) -> None:
        """Note the process id of a worker that has started, and write the table after the last one's."""
        if isinstance(record, Started):
            self._process_ids[record.rank] = record.pid
            self._first_at = self._first_at or time.monotonic()
            if len(self._process_ids) == self._world_size:
                self.show()

    def is_due(self, now: float) -> bool:
        """Whether the table has waited for long enough since the first worker's start."""
        return self._first_at is not None and now - self._first_at > LONGEST_WAIT_SECONDS

    def show(self) -> None:
        """Write the table, unless that has happened or no worker has started."""
        if not self.is_shown and self._process_ids:
            self.is_shown = True
            self._write(self._format_table(self._process_ids))
