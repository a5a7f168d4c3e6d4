"""The agent: starts a run's workers on this host, supervises them, ends them together, and reports the outcome."""

import contextlib
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TextIO

from rankless.config.run_config import RunConfig
from rankless.launch.launcher_profile import load_profile, make_run_folder
from rankless.launch.live_run_publisher import LiveRunPage, make_live_run, measure_live_run
from rankless.launch.ports import require_own_address
from rankless.launch.prepare_run import ReadyJob, set_up_job
from rankless.launch.signal_reader import Interrupts, RendezvousInterrupted, name_signal
from rankless.launch.start_and_end_report import RunReport, WorkerTable, conclude
from rankless.launch.supervisor.fork_server_client import (
    ForkServerClient,
    ForkServerPoolClient,
    NoWorkers,
    WorkerParent,
)
from rankless.launch.supervisor.supervisor import RunOutcome, StoppingWorkers, Supervisor, choose_stop_times
from rankless.launch.supervisor.verdict_types import Verdict
from rankless.launch.watchdog.watchdog import Watchdog, WatchdogConfig, open_status_pages
from rankless.launch.worker_configs import WorkerDescriptors, make_worker_configs
from rankless.launch.worker_output import (
    SOURCES,
    TerminalStreams,
    WorkerOutputFollower,
    count_common_bytes,
    duplicate_terminal,
)
from rankless.records.events import AnyRecord, FileOpened, Notice, ProcessRestarted, Raised, ScriptFinished
from rankless.records.live_run import ProcessRow, identify_agent
from rankless.records.number_formatting import format_count
from rankless.records.run_json_format import RunSummary
from rankless.runtime.fork_and_spawn_server_messages import encode_adoption
from rankless.terminal import process_title
from rankless.terminal.cursor_tracker import CursorTracker, share_terminal

if TYPE_CHECKING:
    from rankless.launch.recovery.survivors import SurvivorRelay, SurvivorRounds


class AttemptObserver(Protocol):
    """Observes a run for what may start it again, one attempt after another."""

    def begin(self, interrupts: Interrupts) -> None:
        """Take note of an attempt whose hosts are all there, and of its signals."""
        ...

    def receive(self, record: AnyRecord) -> None:
        """Take a record of a worker or of an agent."""
        ...

    def take_notices(self) -> Sequence[str]:
        """Return lines for the user. Called several times a second."""
        ...


class NoObserver:
    """Observes nothing."""

    def begin(self, interrupts: Interrupts) -> None:
        """See `AttemptObserver`."""

    def receive(self, record: AnyRecord) -> None:
        """See `AttemptObserver`."""

    def take_notices(self) -> Sequence[str]:
        """See `AttemptObserver`."""
        return ()


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """What the process that starts an agent gives it."""

    token: bytes | None = None
    """The job's token, if ssh has brought it."""
    on_joined: Callable[[], None] = lambda: None
    """Called once when all hosts of the job are there."""
    fork_server: ForkServerPoolClient | None = None
    """A pool of fork servers for consecutive runs; None for a single run."""
    cursor: CursorTracker = field(default_factory=CursorTracker)
    """Follows the script's output, if the agent's own lines go to the same terminal."""
    observer: AttemptObserver = field(default_factory=NoObserver)
    on_summary: Callable[[RunSummary], None] = lambda _summary: None
    """Called on host 0 with the summary of a run that has ended. Runs of other launchers have none."""


def run(
    config: RunConfig,
    *,
    on_record: Callable[[AnyRecord], None],
    out: TextIO,
    err: TextIO,
    hide_progress: Callable[[], AbstractContextManager[None]] = nullcontext,
    context: AgentContext | None = None,
) -> int:
    """Run a job to its end and return its exit code.

    The exit code is 0, that of the rank that failed first, or 128 + the signal that ended the job. No process of the
    job is alive afterwards.

    Args:
        config: What to run.
        on_record: Called with every record of a worker.
        out: Gets rank 0's output, or every rank's with `show="all"`.
        err: Gets the agent's messages, and standard error of programs whose launcher shows it apart.
        hide_progress: Entered while something is written, for an observer that draws on the same terminal.
        context: What the process that starts the agent gives it.
    """
    if config.cluster is None:
        require_own_address(config.request.master_address)
    profile = load_profile(config.request.launcher)
    forwarding = profile.signal_forwarding
    context = context or AgentContext()
    cursor = context.cursor if share_terminal(out, err) else None
    streams = TerminalStreams(out=out, err=err, hide_progress=hide_progress, cursor=cursor)
    with Interrupts(forwarding.numbers if forwarding is not None else ()) as interrupts, _titled(config):
        if config.request.elastic is not None:
            # Imported here: few runs are elastic.
            driver = importlib.import_module(profile.elastic_driver)
            driver_context = driver.DriverContext(
                profile=profile,
                interrupts=interrupts,
                on_record=on_record,
                notify=streams.notify,
                writes=streams.writers(),
            )
            return int(driver.run_elastic(config, config.request.elastic, driver_context))
        try:
            with set_up_job(config, profile, interrupts=interrupts, notify=streams.notify, token=context.token) as job:
                context.on_joined()
                context.observer.begin(interrupts)
                run = HostRun(config, job, interrupts=interrupts, streams=streams, observer=context.observer)
                return _run_on_host(run, on_record, streams, context)
        except RendezvousInterrupted as interrupted:
            streams.notify(f"ended by {name_signal(interrupted.number)}")
            return 128 + interrupted.number


def _run_on_host(
    run: "HostRun", on_record: Callable[[AnyRecord], None], streams: TerminalStreams, context: AgentContext
) -> int:
    """Run this host's part of a job, write how it ended, and return the exit code."""
    with contextlib.closing(run.live):
        outcome, has_shown_cause = run.run_to_end(on_record, fork_server=context.fork_server)
        # On one terminal the user has just seen the traceback; in two files each needs it.
        with_traceback = not has_shown_cause or streams.cursor is None
        try:
            with streams.hide_progress():
                return conclude(outcome, run.report, write=streams.write_error, with_traceback=with_traceback)
        finally:
            if run.report.summary_file is not None and run.report.job.host_index == 0:
                context.on_summary(run.report.summary_file.summary)


@contextlib.contextmanager
def _titled(config: RunConfig) -> Iterator[None]:
    """Title this process as the job's agent meanwhile."""
    hosts = () if config.cluster is None else config.cluster.hosts
    part = f"agent of {format_count(config.worker_count, 'rank')}"
    if config.request.elastic is not None:
        part = "agent of an elastic job"
    elif hosts:
        part += f" on one of {format_count(len(hosts), 'host')}"
    with process_title.kept():
        process_title.show_agent(config.program, part)
        yield


def make_job_runner(fork_server: ForkServerPoolClient | None = None) -> Callable[[RunConfig, TextIO, TextIO], int]:
    """Return a function that runs a job with its output on two given streams, and returns its exit code."""

    def run_job(config: RunConfig, out: TextIO, err: TextIO) -> int:
        context = AgentContext(fork_server=fork_server)
        return run(config, on_record=lambda _record: None, out=out, err=err, context=context)

    return run_job


def _make_survivors(job: ReadyJob) -> "SurvivorRounds | SurvivorRelay | None":
    """Return this host's part in letting workers continue without lost ones; None if none may be lost."""
    if not job.start.most_lost_workers:
        return None
    # Imported here: workers of many runs cannot be lost.
    survivors: SurvivorRounds | SurvivorRelay = importlib.import_module(
        "rankless.launch.recovery.survivors"
    ).make_survivors(job)
    return survivors


class HostRun:
    """This host's part of a run whose hosts are all there."""

    def __init__(
        self,
        config: RunConfig,
        job: ReadyJob,
        *,
        interrupts: Interrupts,
        streams: TerminalStreams,
        observer: AttemptObserver,
    ) -> None:
        self._config, self._job, self._profile = config, job, job.profile
        self._interrupts, self._streams, self._observer = interrupts, streams, observer
        self._folder = folder = make_run_folder(config, job.profile, job.start, job.host_index)
        self._pages = pages = open_status_pages(config.worker_count)
        self._terminal_ends = duplicate_terminal(config, job.start)
        self._survivors = _make_survivors(job)
        channels = [] if self._survivors is None else self._survivors.channels.descriptors
        descriptors = WorkerDescriptors(pages, channels, self._terminal_ends)
        content = job.attach_roles(folder)
        self._workers = make_worker_configs(config, job, folder=folder, descriptors=descriptors, content=content)
        self.live = LiveRunPage(measure_live_run(config, job, folder=folder))
        descriptor = self.live.descriptor
        self.report = RunReport(config, job, folder, agent=None if descriptor is None else identify_agent(descriptor))
        self.live.begin(make_live_run(config, job, folder=folder, pages=pages, log_file=self.report.log_file))
        self._parent: WorkerParent | None = None
        self._watchdog = self._make_watchdog(folder)
        lead, is_quiet = self._workers[0] if self._workers else None, config.request.agent_output == "quiet"
        streams.write_error("" if is_quiet else self.report.format_opening(lead))
        self._started_rows: Sequence[ProcessRow] = ()
        """The processes beside the workers; on host 0 those of all hosts, once they serve."""
        self._table = WorkerTable(
            lambda process_ids: "" if is_quiet else self.report.format_processes(lead, process_ids, self._started_rows),
            streams.write_table,
            world_size=job.start.world_size,
        )
        self._terminal = self._open_terminal(folder)
        self._log_files = {
            worker.config.rank: worker.config.error_log_file or worker.config.log_file for worker in self._workers
        }
        self._shared_files = SharedFiles(foreign=not self._profile.uses_rankless_api)
        self._notices: set[str] = set()
        self._new_notices: list[str] = []
        self._due_notices: list[str] = []
        """Those whose rank's output of the time before them is on the terminal after the next `pump`."""
        self._on_record: Callable[[AnyRecord], None] = lambda _record: None
        self._has_parent_ended = False
        self._shown_instead: list[tuple[int, str]] = []
        """Lost workers, and the log file of another one that the terminal shows instead."""
        self._traceback_ends: dict[int, int] = {}
        """The size of a rank's log file with the traceback that ends the rank."""

    def _make_watchdog(self, folder: str) -> Watchdog:
        config, job = self._config, self._job
        return Watchdog(
            WatchdogConfig(
                worker_configs=[worker.config for worker in self._workers],
                pages=self._pages if config.hang_timeout_seconds != 0 else (),
                timeout_seconds=config.hang_timeout_seconds,
                peers=job.peers,
                parent_process=lambda: None if self._parent is None else self._parent.process_id,
                stacks_file=os.path.join(folder, f"stacks{job.host_index or ''}.txt"),
                host_name=self.report.host_name,
                list_rows=self._list_rows,
                end_workers=self._end_workers,
                process_host_name=self.report.process_host_name,
                lone_processes=job.start.list_lone_processes(),
            )
        )

    def run_to_end(
        self, on_record: Callable[[AnyRecord], None], *, fork_server: ForkServerPoolClient | None = None
    ) -> tuple[RunOutcome, bool]:
        """Start all processes of this host, supervise them, and end those that are left.

        Returns:
            The outcome, and whether the output of the workers had the traceback of the rank that failed first.
        """
        with contextlib.ExitStack() as stack:
            for page in (*self._pages, *self._terminal_ends):
                stack.callback(os.close, page)
            if self._survivors is not None:
                stack.callback(self._survivors.channels.close)
            for role in self._job.roles:
                stack.callback(role.stop, lambda: self._job.peers.poll(time.monotonic()))  # sends heartbeats
            self._start_roles()
            return self._run_workers(on_record, fork_server)

    def _start_roles(self) -> None:
        """Start the processes beside the workers of this host, and wait for those of the others."""
        job = self._job
        if job.roles:
            # Imported here: most runs have workers alone.
            role_startup = importlib.import_module("rankless.launch.start_processes_beside_workers")
            start = role_startup.CommonStart(
                roles=job.roles, peers=job.peers, names=job.names, notify=self._streams.notify
            )
            with self.report.recorded_start():
                self._started_rows = start.run(self._interrupts)
            for warning in filter(None, (role.warning for role in job.roles)):
                self._streams.notify(warning)

    def _list_rows(self) -> list[ProcessRow]:
        """Return what each process of this host beside its workers is, at present."""
        return [row for role in self._job.roles for row in role.list_rows()]

    def _run_workers(
        self, on_record: Callable[[AnyRecord], None], fork_server: ForkServerPoolClient | None
    ) -> tuple[RunOutcome, bool]:
        job = self._job
        self._parent = parent = self._start(fork_server)
        if self._survivors is not None:
            self._survivors.channels.forget_worker_ends()
            self._survivors.channels.know_launches(self._workers)
            self._survivors.channels.on_replaced = lambda rank, pid: parent.send(encode_adoption(rank, pid))
        self._on_record = on_record
        try:
            supervisor = Supervisor(
                parent,
                peers=job.peers,
                interrupts=self._interrupts,
                observer=self,
                times=choose_stop_times(self._config, self._profile),
                stopping=StoppingWorkers([worker.config.rank for worker in self._workers], self._pages),
            )
            outcome = supervisor.run_to_end()
            return outcome, self._show_root_cause(outcome.verdict)
        finally:
            others = (role.list_process_ids() for role in job.roles)
            parent.close(timeout_seconds=1.0, spare=frozenset().union(*others))
            self._table.show()
            self._terminal.close()
            for _ in range(2):
                self._show_notices()
            if self.report.summary_file is not None:
                self.report.summary_file.measure(self._pages, 0 if self._survivors is None else self._survivors.first)

    @property
    def has_processes(self) -> bool:
        """See `RunObserver`."""
        return bool(self._job.roles)

    def before_records(self, *, is_settling: bool) -> Sequence[AnyRecord]:
        """See `RunObserver`."""
        self._has_parent_ended = self._parent is not None and self._parent.poll() is not None
        self._terminal.measure()
        # The processes beside the workers of this host serve the workers of others, too.
        if self._has_parent_ended and not self._job.peers.are_running and not is_settling:
            return []
        return [record for role in self._job.roles for record in role.poll()]

    def judge(self, records: Sequence[AnyRecord]) -> Sequence[AnyRecord]:
        """See `RunObserver`."""
        for role in self._job.roles:
            records = role.cover_hosts(records)
        if self._survivors is None:
            return records
        before, judged = self._survivors.first, self._survivors.judge(records)
        if self._survivors.first != before:
            self._show_next_worker(before, self._survivors.first)
        return judged

    def _end_workers(self, ranks: Sequence[int]) -> bool:
        """Kill workers that hold up the others, if these can continue without them, and return whether they can."""
        return self._survivors is not None and self._survivors.end_workers(ranks)

    def _show_next_worker(self, lost: int, first: int) -> None:
        """Show the output of another worker instead of that of one that was lost: what the lost one had not written."""
        configs = [worker.config for worker in self._workers]
        shown = self._profile.shown_streams(self._config, self._folder, configs[lost:])
        next_configs = configs[first:]
        left = self._profile.shown_streams(self._config, self._folder, next_configs) if next_configs else []
        for before, after in zip(shown, left, strict=False):
            if after.path not in {stream.path for stream in shown}:
                self._terminal.add(after, position=count_common_bytes(before.path, after.path))
                self._shown_instead.append((lost, after.path))

    def _show_replaced_worker(self, first: int) -> None:
        """Show the output of a worker that was replaced, and no more that of others instead of it."""
        for lost, path in self._shown_instead:
            if lost >= first:
                self._terminal.remove(path)
        self._shown_instead = [each for each in self._shown_instead if each[0] < first]

    def cover_processes(self, records: Sequence[AnyRecord]) -> Sequence[AnyRecord]:
        """See `RunObserver`."""
        for role in self._job.roles:
            records = role.cover_processes(records)
        return records

    def receive(self, record: AnyRecord) -> None:
        """See `RunObserver`."""
        is_host_0 = self._job.host_index == 0
        text = None
        if isinstance(record, FileOpened) and record.rank in self._log_files:
            text = self._shared_files.check(record)
        elif isinstance(record, Notice):
            text = record.text
        elif isinstance(record, ProcessRestarted):
            self._new_notices.append(self.report.name_restarted_host(record))  # also if another one had the same text
        elif self._profile.withholds_tracebacks and record.rank in self._log_files:
            self._withhold(record)
        if text is not None and text not in self._notices and is_host_0:
            self._notices.add(text)
            self._new_notices.append(text)
        self._table.receive(record)
        self.live.receive(record)
        self._watchdog.receive(record)
        if self.report.summary_file is not None:
            self.report.summary_file.receive(record)
        self._observer.receive(record)
        self._on_record(record)

    def tick(self) -> list[AnyRecord]:
        """See `RunObserver`."""
        peers = self._job.peers
        notices = [] if self._survivors is None else self._survivors.tick()
        if self._survivors is not None and self._shown_instead:
            self._show_replaced_worker(self._survivors.first)
        for role in self._job.roles:
            role.tick()
        if self._has_parent_ended or self._table.is_due(time.monotonic()):
            self._table.show()
        if self._has_parent_ended:
            self._terminal.finish()  # host 0 may stop reading once it knows that no worker is alive here
        elif self._table.is_shown and not peers.has_unsent_data:
            self._terminal.pump()  # otherwise the output stays in the files until the connection catches up
        self._show_notices()
        self.live.set_processes(self._list_rows())
        self.live.publish()
        return [*notices, *self._watchdog.tick(time.monotonic())]

    def _show_notices(self) -> None:
        for text in self._due_notices:
            self._streams.notify(text)
        self._due_notices, self._new_notices = self._new_notices, [*self._observer.take_notices()]

    def _withhold(self, record: AnyRecord) -> None:
        if isinstance(record, Raised) and record.output_start is not None:
            self._terminal.withhold(self._log_files[record.rank], record.output_start)
        elif isinstance(record, ScriptFinished) and record.output_end is not None:
            self._traceback_ends[record.rank] = record.output_end

    def _show_root_cause(self, verdict: Verdict | None) -> bool:
        """Show the traceback of the rank that failed first, and of the others what follows their tracebacks.

        Returns whether there was such a traceback.
        """
        root_cause = None if verdict is None else verdict.root_cause_rank
        shown = [
            self._terminal.resume(
                path, skip_to=None if rank == root_cause else self._traceback_ends.get(rank, sys.maxsize)
            )
            and rank == root_cause
            for rank, path in self._log_files.items()
        ]
        return any(shown)

    def _open_terminal(self, folder: str) -> WorkerOutputFollower:
        config, peers = self._config, self._job.peers
        writers = self._streams.writers()
        if self._job.host_index > 0 and self._profile.output_hosts == "gathered":
            writers = {source: functools.partial(peers.send_output, source) for source in SOURCES}
        is_shown = self._job.host_index == 0 or self._profile.output_hosts != "first"
        workers = [worker.config for worker in self._workers]
        streams = self._profile.shown_streams(config, folder, workers) if is_shown else []
        terminal = WorkerOutputFollower(streams, writers=writers)
        peers.set_output_sink(terminal.show)
        return terminal

    def _start(self, fork_server: ForkServerPoolClient | None) -> WorkerParent:
        config, job = self._config, self._job
        if not self._workers:
            return NoWorkers()
        if fork_server is not None and not fork_server.is_ready(config, until=self._interrupts):
            fork_server = None
        return ForkServerClient(
            config,
            self._workers,
            log_path=self.report.parent_log,
            other_hosts=[each for host, each in enumerate(job.start.addresses) if host != job.host_index],
            pool=fork_server,
        )


MAX_WARNINGS = 3
_EVENTS = "events.out.tfevents."
MAX_TRACKED_FILES = 10_000

_FIX = "let one do it with rankless.once(…), save models with rankless.save, or put rankless.rank() into the name"
_FIX_WITHOUT_RANKLESS = "let one do it, where RANK is 0, or put the rank into the name"


class SharedFiles:
    """Tracks which rank writes which file."""

    def __init__(self, *, foreign: bool = False) -> None:
        self._fix = _FIX_WITHOUT_RANKLESS if foreign else _FIX
        self._writers: dict[str, int] = {}
        self._shared: set[str] = set()

    def check(self, record: FileOpened) -> str | None:
        """Return a warning when a second rank writes a file. Only MAX_WARNINGS files give one."""
        path = _name_of_all(record.path)
        first = self._writers.get(path)
        if first is None and len(self._writers) < MAX_TRACKED_FILES:
            self._writers[path] = record.rank
        if first is None or first == record.rank or path in self._shared or len(self._shared) >= MAX_WARNINGS:
            return None
        self._shared.add(path)
        low, high = sorted((first, record.rank))
        where = f" ({_shorten(record.line)})" if record.line else ""
        more = "" if len(self._shared) < MAX_WARNINGS else "; further files are not named"
        return f"ranks {low} and {high} both write {_shorten(path)}{where}: {self._fix}{more}"


def _name_of_all(path: str) -> str:
    """Return one name for the event files of TensorBoard in a folder, whose names differ from process to process."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{_EVENTS}*") if name.startswith(_EVENTS) else path


def _shorten(path: str) -> str:
    """Return a path relative to the current folder if it lies below it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
