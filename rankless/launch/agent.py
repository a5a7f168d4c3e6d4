"""The agent: starts a run's workers on this host, supervises them, ends them together, and reports the outcome."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TextIO

from rankless.config.run_config import RunConfig
from rankless.launch.elastic.driver import DriverContext, run_elastic
from rankless.launch.job_setup import ReadyJob, set_up_job
from rankless.launch.log_files import make_run_folder
from rankless.launch.ports import require_own_address
from rankless.launch.profile import load_profile
from rankless.launch.rendezvous.leader import RendezvousInterrupted
from rankless.launch.rendezvous.peers import FollowerPeers, LeaderPeer
from rankless.launch.report import RunReport, conclude
from rankless.launch.signals import Interrupts
from rankless.launch.supervisor.failure_attribution import name_signal
from rankless.launch.supervisor.fork_server_client import ForkServerClient, InheritedSockets
from rankless.launch.supervisor.fork_server_pool_client import ForkServerPoolClient
from rankless.launch.supervisor.shared_files import SharedFiles
from rankless.launch.supervisor.supervisor import RunOutcome, Supervisor
from rankless.launch.supervisor.terminal_text import format_count
from rankless.launch.watchdog.watchdog import Watchdog, WatchdogConfig, open_status_pages
from rankless.launch.worker_configs import make_worker_configs
from rankless.launch.worker_output import SOURCES, Source, Terminal, Write, make_writer
from rankless.launch.worker_table import WorkerTable
from rankless.records.events import AnyRecord, FileOpened, Notice
from rankless.terminal import process_title


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """What the process that starts an agent gives it."""

    token: bytes | None = None
    """The job's token, if ssh has brought it."""
    on_joined: Callable[[], None] = lambda: None
    """Called once when all hosts of the job are there."""
    fork_server: ForkServerPoolClient | None = None
    """A pool of fork servers for consecutive runs; None for a single run."""


@dataclass(frozen=True, kw_only=True)
class _TerminalStreams:
    out: TextIO
    err: TextIO
    hide_progress: Callable[[], AbstractContextManager[None]]

    def writers(self) -> dict[Source, Write]:
        return {"out": make_writer(self.out, self.hide_progress), "err": make_writer(self.err, self.hide_progress)}

    def notify(self, text: str) -> None:
        with self.hide_progress():
            self.write_error(f"rankless: {text}\n")

    def write_error(self, text: str) -> None:
        try:
            self.err.write(text)
            self.err.flush()
        except OSError:  # the terminal is gone, and training goes on
            return

    def write_table(self, text: str) -> None:
        with self.hide_progress():
            self.write_error(text)


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
        require_own_address(config.master_address)
    forwarding = load_profile(config.launcher).signal_forwarding
    context = context or AgentContext()
    streams = _TerminalStreams(out=out, err=err, hide_progress=hide_progress)
    with Interrupts(forwarding.numbers if forwarding is not None else ()) as interrupts, _titled(config):
        if config.elastic is not None:
            driver_context = DriverContext(
                interrupts=interrupts, on_record=on_record, notify=streams.notify, writes=streams.writers()
            )
            return run_elastic(config, config.elastic, driver_context)
        try:
            with set_up_job(config, interrupts=interrupts, notify=streams.notify, token=context.token) as job:
                context.on_joined()
                run = HostRun(config, job, interrupts=interrupts, streams=streams)
                outcome = run.run_to_end(on_record, fork_server=context.fork_server)
                with hide_progress():
                    return conclude(outcome, run.report, write=streams.write_error)
        except RendezvousInterrupted as interrupted:
            streams.notify(f"ended by {name_signal(interrupted.number)}")
            return 128 + interrupted.number


@contextlib.contextmanager
def _titled(config: RunConfig) -> Iterator[None]:
    """Title this process as the job's agent meanwhile."""
    hosts = () if config.cluster is None else config.cluster.hosts
    part = f"agent of {format_count(config.worker_count, 'rank')}"
    if config.elastic is not None:
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


class HostRun:
    """This host's part of a run whose hosts are all there."""

    def __init__(self, config: RunConfig, job: ReadyJob, *, interrupts: Interrupts, streams: _TerminalStreams) -> None:
        self._config = config
        self._profile = load_profile(config.launcher)
        self._job = job
        self._interrupts = interrupts
        self._streams = streams
        folder = make_run_folder(config, job.start, job.host_index)
        pages = open_status_pages(config.worker_count, timeout_seconds=config.hang_timeout_seconds)
        self._workers = make_worker_configs(config, job, folder=folder, pages=pages)
        self.report = RunReport(config, job, folder)
        self._watchdog = Watchdog(
            WatchdogConfig(
                worker_configs=[worker.config for worker in self._workers],
                pages=pages,
                timeout_seconds=config.hang_timeout_seconds,
                peers=job.peers,
                stacks_file=os.path.join(folder, f"stacks{job.host_index or ''}.txt"),
                host_name=self.report.host_name,
            )
        )
        lead = self._workers[0]
        streams.write_error(self.report.format_opening(lead))
        self._table = WorkerTable(
            lambda process_ids: self.report.format_workers(lead, process_ids),
            streams.write_table,
            world_size=job.start.world_size,
        )
        self._terminal = self._open_terminal(folder)

    def run_to_end(
        self, on_record: Callable[[AnyRecord], None], *, fork_server: ForkServerPoolClient | None = None
    ) -> RunOutcome:
        """Start the workers, supervise them, and end those that are left."""
        job = self._job
        parent = self._start(fork_server)
        if job.store is not None:
            job.store.close()  # rank 0 alone listens: once it ends, the system refuses ranks that connect late
        notices: set[str] = set()
        files = SharedFiles(foreign=not self._profile.uses_rankless_api)

        def receive(record: AnyRecord) -> None:
            text = None
            if isinstance(record, FileOpened) and job.start.host_of(record.rank) == job.host_index:
                text = files.check(record)
            elif isinstance(record, Notice):
                text = record.text
            if text is not None and text not in notices and job.host_index == 0:
                notices.add(text)
                self._streams.notify(text)
            self._table.receive(record)
            self._watchdog.receive(record)
            on_record(record)

        def tick() -> list[AnyRecord]:
            if parent.poll() is not None or self._table.is_due(time.monotonic()):
                self._table.show()
            if parent.poll() is not None:
                self._terminal.finish()  # host 0 may stop reading once it knows that no worker is alive here
            elif self._table.is_shown and not (isinstance(job.peers, LeaderPeer) and job.peers.has_unsent_data):
                self._terminal.pump()  # otherwise the output stays in the files until the connection catches up
            return self._watchdog.tick(time.monotonic())

        try:
            supervisor = Supervisor(
                parent,
                peers=job.peers,
                interrupts=self._interrupts,
                on_record=receive,
                on_tick=tick,
                forwarding=self._profile.signal_forwarding,
            )
            return supervisor.run_to_end()
        finally:
            parent.close(timeout_seconds=1.0)
            self._table.show()
            self._terminal.close()
            self._watchdog.close()

    def _open_terminal(self, folder: str) -> Terminal:
        config, peers = self._config, self._job.peers
        writers = self._streams.writers()
        if isinstance(peers, LeaderPeer) and self._profile.output_hosts == "gathered":
            writers = {source: functools.partial(peers.send_output, source) for source in SOURCES}
        is_shown = self._job.host_index == 0 or self._profile.output_hosts != "first"
        workers = [worker.config for worker in self._workers]
        streams = self._profile.shown_streams(config, folder, workers) if is_shown else []
        terminal = Terminal(streams, writers=writers)
        if isinstance(peers, FollowerPeers):
            peers.set_output_sink(terminal.show)
        return terminal

    def _start(self, fork_server: ForkServerPoolClient | None) -> ForkServerClient:
        config, job = self._config, self._job
        if fork_server is not None and not fork_server.is_ready(config, until=self._interrupts):
            fork_server = None
        return ForkServerClient(
            config,
            self._workers,
            log_path=self.report.parent_log,
            sockets=InheritedSockets(store=job.store),
            other_hosts=[each for host, each in enumerate(job.start.addresses) if host != job.host_index],
            pool=fork_server,
        )
