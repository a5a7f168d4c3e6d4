"""The agent of another host in an elastic job, started by ssh: does what the driver says through standard input.

When that ends, or the driver is silent, nothing of the job is left alive here.
"""

import functools
import os
import selectors
import signal
import time
from collections.abc import Callable

from rankless.config import environment
from rankless.config.hosts import interface_of
from rankless.config.validation import make_run_config
from rankless.errors import RanklessError
from rankless.launch.elastic.local_workers import LocalWorkers
from rankless.launch.elastic.ssh_protocol import (
    BEAT_SECONDS,
    SILENT_SECONDS,
    Beat,
    End,
    FrameDown,
    Happened,
    Heard,
    Here,
    Kill,
    Order,
    Pipe,
    Say,
    Shown,
    Signal,
    Task,
    Unable,
)
from rankless.launch.profile import load_profile
from rankless.launch.rendezvous.host_facts import installed_versions
from rankless.launch.supervisor.supervisor import POLL_SECONDS
from rankless.launch.worker_configs import ElasticSlot, make_elastic_worker
from rankless.launch.worker_output import SOURCES, Terminal
from rankless.runtime.fast_exit import FastExit


def main(fast_exit: FastExit) -> Callable[[], None]:  # noqa: ARG001  # what every process of ours is started with
    """Return what serves the driver."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return _serve


def _serve() -> None:
    pipe = Pipe(0, os.dup(1))
    os.dup2(2, 1)  # what somebody prints is no frame
    agent: HostAgent | None = None
    heard = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        try:
            while not pipe.is_over and time.monotonic() - heard < SILENT_SECONDS:
                for frame in pipe.receive(FrameDown):
                    heard = time.monotonic()
                    if isinstance(frame, Task):
                        try:
                            agent = HostAgent(frame, pipe, selector)
                        except (RanklessError, OSError) as error:
                            pipe.send(Unable(why="; ".join(str(error).split("\n")).strip("; ")))
                            return
                    elif agent is not None:
                        agent.obey(frame)
                if agent is not None and not agent.turn():
                    break
                selector.select(POLL_SECONDS)
        finally:
            if agent is not None:
                agent.close()
            pipe.flush()


class HostAgent:
    """The workers of this host, as the driver's hand."""

    def __init__(self, task: Task, pipe: Pipe, selector: selectors.BaseSelector) -> None:
        environment.apply(task.environment)
        self._task = task
        self._pipe = pipe
        self._config = make_run_config(task.program, task.request)
        os.makedirs(task.folder, exist_ok=True)
        address, driver_address = environment.ssh_addresses()
        self._interface = interface_of(address)
        here = Here(
            address=address, interface=self._interface, driver_address=driver_address, versions=installed_versions()
        )
        pipe.send(here)
        self._terminal = Terminal([], writers={source: functools.partial(self._show, source) for source in SOURCES})
        log_path = os.path.join(task.folder, f"parent-{address}.log")
        self._crew = LocalWorkers(self._config, log_path=log_path, selector=selector)
        self._beaten = 0.0

    def obey(self, frame: FrameDown) -> None:
        """Do what the driver says."""
        if isinstance(frame, Order):
            slot = ElasticSlot(number=frame.number, host=frame.host, slot=frame.slot)
            task = self._task
            launch = make_elastic_worker(self._config, task.start, slot, folder=task.folder, interface=self._interface)
            profile = load_profile(self._config.launcher)
            for stream in profile.shown_streams(self._config, task.folder, [launch.config]):
                self._terminal.add(stream)
            self._crew.start(launch)
        elif isinstance(frame, Say):
            self._crew.tell(frame.number, frame.word)
        elif isinstance(frame, End):
            self._crew.end(frame.number, frame.why)
        elif isinstance(frame, Signal):
            self._crew.signal(frame.number)
        elif isinstance(frame, Kill):
            self._crew.kill()

    def turn(self) -> bool:
        """Tell the driver what is new; False once the workers' parent has ended."""
        has_ended = self._crew.has_ended()
        self._terminal.pump()
        for news in self._crew.turn():
            if isinstance(news, tuple):
                self._pipe.send(Heard(number=news[0], word=news[1]))
            else:
                self._pipe.send(Happened(record=news))
        if time.monotonic() - self._beaten >= BEAT_SECONDS:
            self._beaten = time.monotonic()
            self._pipe.send(Beat())
        return not has_ended

    def close(self) -> None:
        """See to it that nothing is left."""
        self._crew.close()
        self._terminal.close()

    def _show(self, source: str, data: bytes) -> None:
        self._pipe.send(Shown(source=source, data=data))  # type: ignore[arg-type]  # one of SOURCES
