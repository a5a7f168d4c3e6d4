"""The agent: starts a run's workers on this host, watches them, ends them together, and says how it went."""

import functools
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TextIO

from rankless.config.run_config import RunConfig
from rankless.launch.elastic.driver import DriverContext, run_elastic
from rankless.launch.job_setup import Assembled, assembled
from rankless.launch.log_files import make_run_folder
from rankless.launch.ports import require_own_address
from rankless.launch.profile import load_profile
from rankless.launch.rendezvous.leader import RendezvousInterrupted
from rankless.launch.rendezvous.peers import FollowerPeers, LeaderPeer
from rankless.launch.report import Account, conclude
from rankless.launch.signals import Interrupts
from rankless.launch.supervisor.failure_attribution import name_signal
from rankless.launch.supervisor.fork_server_client import ForkServerClient, InheritedSockets
from rankless.launch.supervisor.fork_server_pool_client import ForkServerPoolClient
from rankless.launch.supervisor.shared_files import SharedFiles
from rankless.launch.supervisor.supervisor import RunOutcome, Supervisor
from rankless.launch.watchdog.watchdog import Watchdog, WatchdogConfig, open_status_pages
from rankless.launch.worker_configs import make_worker_configs
from rankless.launch.worker_output import SOURCES, Source, Terminal, Write, writer_to
from rankless.records.events import AnyRecord, FileOpened, Notice


@dataclass(frozen=True, kw_only=True)
class Outside:
    """What an agent is given by who has started it."""

    token: bytes | None = None
    on_joined: Callable[[], None] = lambda: None
    fork_server: ForkServerPoolClient | None = None
    """Where runs that follow each other get their warm parents; None for a run that is alone."""


def run(
    config: RunConfig,
    *,
    on_record: Callable[[AnyRecord], None],
    out: TextIO,
    err: TextIO,
    making_room: Callable[[], AbstractContextManager[None]] = nullcontext,
    outside: Outside | None = None,
) -> int:
    """Run a job to its end and return its exit code: 0, the culprit's, or 128 + the signal that ended it.

    Rank 0's output (every rank's with `show="all"`) goes to `out`, what the agent has to say to `err`, a foreign
    program's two streams to both, every record to `on_record`. `making_room` is entered around each writing, for an
    observer that draws on the same terminal. `outside` is what an agent has of who has started it. Nothing that the job
    started is alive afterwards.
    """
    if config.cluster is None:
        require_own_address(config.master_address)
    forwarding = load_profile(config.launcher).signal_forwarding
    outside = outside or Outside()

    def tell(text: str) -> None:
        with making_room():
            _tell(err, f"rankless: {text}\n")

    with Interrupts(forwarding.numbers if forwarding is not None else ()) as interrupts:
        if config.elastic is not None:
            around = DriverContext(
                interrupts=interrupts,
                on_record=on_record,
                tell=tell,
                writes={"out": writer_to(out, making_room), "err": writer_to(err, making_room)},
            )
            return run_elastic(config, config.elastic, around)
        try:
            with assembled(config, interrupts=interrupts, tell=tell, token=outside.token) as job:
                outside.on_joined()
                run = Run(config, job, interrupts=interrupts, out=out, err=err, making_room=making_room)
                outcome = run.to_end(on_record, tell, fork_server=outside.fork_server)
                with making_room():
                    return conclude(outcome, run.account, tell_text=lambda text: _tell(err, text))
        except RendezvousInterrupted as interrupted:
            tell(f"ended by {name_signal(interrupted.number)}")
            return 128 + interrupted.number


def job_runner(fork_server: ForkServerPoolClient | None = None) -> Callable[[RunConfig, TextIO, TextIO], int]:
    """Return a function that runs a job with its output on two given streams, and returns its exit code."""

    def run_job(config: RunConfig, out: TextIO, err: TextIO) -> int:
        return run(config, on_record=lambda _record: None, out=out, err=err, outside=Outside(fork_server=fork_server))

    return run_job


class Run:
    """One run whose hosts are all there."""

    def __init__(
        self,
        config: RunConfig,
        job: Assembled,
        *,
        interrupts: Interrupts,
        out: TextIO,
        err: TextIO,
        making_room: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._config = config
        self._profile = load_profile(config.launcher)
        self._job = job
        self._interrupts = interrupts
        folder = make_run_folder(config, job.start, job.host_index)
        pages = open_status_pages(config.worker_count, timeout_seconds=config.hang_timeout_seconds)
        self._workers = make_worker_configs(config, job, folder=folder, pages=pages)
        self.account = Account(config, job, folder)
        self._watchdog = Watchdog(
            WatchdogConfig(
                worker_configs=[worker.config for worker in self._workers],
                pages=pages,
                timeout_seconds=config.hang_timeout_seconds,
                peers=job.peers,
                stacks_file=os.path.join(folder, f"stacks{job.host_index or ''}.txt"),
                host_name=self.account.host_name,
            )
        )
        _tell(err, self.account.opening(self._workers[0]))
        shows = job.host_index == 0 or self._profile.output_hosts != "first"
        configs = [worker.config for worker in self._workers]
        streams = self._profile.shown_streams(config, folder, configs) if shows else []
        writes: dict[Source, Write] = {"out": writer_to(out, making_room), "err": writer_to(err, making_room)}
        if isinstance(job.peers, LeaderPeer) and self._profile.output_hosts == "gathered":
            writes = {source: functools.partial(job.peers.send_output, source) for source in SOURCES}
        self._terminal = Terminal(streams, writes=writes)
        if isinstance(job.peers, FollowerPeers):
            job.peers.set_output_sink(self._terminal.show)

    def to_end(
        self,
        on_record: Callable[[AnyRecord], None],
        tell: Callable[[str], None],
        *,
        fork_server: ForkServerPoolClient | None = None,
    ) -> RunOutcome:
        """Start the workers, watch them, and end what is left of them."""
        job = self._job
        parent = self._start(fork_server)
        if job.store is not None:
            job.store.close()  # rank 0 alone listens: when it is gone, ranks that still come are refused at once
        said: set[str] = set()
        files = SharedFiles(foreign=not self._profile.uses_rankless_api)

        def take(record: AnyRecord) -> None:
            text = None
            if isinstance(record, FileOpened) and job.start.host_of(record.rank) == job.host_index:
                text = files.check(record)
            elif isinstance(record, Notice):
                text = record.text
            if text is not None and text not in said and job.host_index == 0:
                said.add(text)
                tell(text)
            self._watchdog.receive(record)
            on_record(record)

        def look() -> list[AnyRecord]:
            if parent.poll() is not None:
                self._terminal.finish()  # host 0 may not listen any more once it is told that nothing lives here
            elif not (isinstance(job.peers, LeaderPeer) and job.peers.has_unsent_data):
                self._terminal.pump()  # what a slow line cannot take yet stays in the files
            return self._watchdog.tick(time.monotonic())

        try:
            watch = Supervisor(
                parent,
                peers=job.peers,
                interrupts=self._interrupts,
                on_record=take,
                on_tick=look,
                forwarding=self._profile.signal_forwarding,
            )
            return watch.run_to_end()
        finally:
            parent.close(timeout_seconds=1.0)
            self._terminal.close()
            self._watchdog.close()

    def _start(self, fork_server: ForkServerPoolClient | None) -> ForkServerClient:
        config, job = self._config, self._job
        if fork_server is not None and not fork_server.is_ready(config, until=self._interrupts):
            fork_server = None
        return ForkServerClient(
            config,
            self._workers,
            log_path=self.account.parent_log,
            sockets=InheritedSockets(store=job.store),
            other_hosts=[each for host, each in enumerate(job.start.addresses) if host != job.host_index],
            pool=fork_server,
        )


def _tell(err: TextIO, text: str) -> None:
    try:
        err.write(text)
        err.flush()
    except OSError:  # a terminal that is gone never stops training
        return
