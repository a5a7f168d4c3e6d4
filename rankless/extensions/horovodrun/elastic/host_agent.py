"""The agent of another host in an elastic job. ssh starts it, and the driver sends it commands on standard input.

The agent ends all workers and itself when standard input ends, or the driver's heartbeats stop.
"""

import functools
import os
import selectors
import signal
import time
from collections.abc import Callable

from rankless.config import environment
from rankless.config.hosts_and_addresses import interface_of
from rankless.config.make_run_config import make_run_config
from rankless.errors import RanklessError
from rankless.extensions.horovodrun.elastic.local_workers import LocalWorkers
from rankless.extensions.horovodrun.elastic.ssh_protocol import (
    HEARTBEAT_SECONDS,
    HEARTBEAT_TIMEOUT_SECONDS,
    AgentCommand,
    AgentFailed,
    AgentReady,
    HostTask,
    KillIfStalled,
    KillWorkers,
    PipeConnection,
    SignalWorkers,
    StartWorker,
)
from rankless.launch.launcher_profile import load_profile
from rankless.launch.rendezvous.host_consistency import installed_versions
from rankless.launch.rendezvous.messages import (
    Heartbeat,
    SendToWorker,
    WorkerMessageReceived,
    WorkerOutput,
    WorkerRecords,
)
from rankless.launch.supervisor.supervisor import POLL_SECONDS
from rankless.launch.worker_configs import ElasticSlot, make_elastic_worker
from rankless.launch.worker_output import SOURCES, Source, WorkerOutputFollower
from rankless.runtime.fast_exit import FastExit
from rankless.terminal import process_title


def main(fast_exit: FastExit) -> Callable[[], None]:  # noqa: ARG001  # the signature of every process's main
    """Return the function that serves the driver."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return _serve


def _serve() -> None:
    connection = PipeConnection(0, os.dup(1))
    os.dup2(2, 1)  # output that somebody prints must not get into the frames
    agent: HostAgent | None = None
    last_received_at = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        try:
            while not connection.is_closed and time.monotonic() - last_received_at < HEARTBEAT_TIMEOUT_SECONDS:
                for command in connection.receive(AgentCommand):
                    last_received_at = time.monotonic()
                    if isinstance(command, HostTask):
                        try:
                            agent = HostAgent(command, connection, selector)
                        except (RanklessError, OSError) as error:
                            connection.send(AgentFailed(reason="; ".join(str(error).split("\n")).strip("; ")))
                            return
                    elif agent is not None:
                        agent.execute(command)
                if agent is not None and not agent.poll():
                    break
                selector.select(POLL_SECONDS)
        finally:
            if agent is not None:
                agent.close()
            connection.flush()


class HostAgent:
    """The workers of this host, which the driver controls."""

    def __init__(self, task: HostTask, connection: PipeConnection, selector: selectors.BaseSelector) -> None:
        environment.apply(task.environment)
        process_title.show_agent(task.program, "agent of a host of an elastic job")
        self._task = task
        self._connection = connection
        self._config = make_run_config(task.program, task.request)
        self._profile = load_profile(self._config.request.launcher)
        os.makedirs(task.folder, exist_ok=True)
        address, driver_address = environment.ssh_addresses()
        self._interface = interface_of(address)
        connection.send(
            AgentReady(
                address=address,
                interface=self._interface,
                driver_address=driver_address,
                versions=installed_versions(),
            )
        )
        self._terminal = WorkerOutputFollower(
            [], writers={source: functools.partial(self._show, source) for source in SOURCES}
        )
        log_path = os.path.join(task.folder, f"parent-{address}.log")
        self._workers = LocalWorkers(self._config, log_path=log_path, selector=selector)
        self._last_heartbeat_at = 0.0

    def execute(self, command: AgentCommand) -> None:
        """Execute a command of the driver."""
        if isinstance(command, StartWorker):
            self._start_worker(command)
        elif isinstance(command, SendToWorker):
            self._workers.send(command.number, command.message)
        elif isinstance(command, KillIfStalled):
            self._workers.kill_if_stalled(command.number, command.reason)
        elif isinstance(command, SignalWorkers):
            self._workers.signal(command.signal)
        elif isinstance(command, KillWorkers):
            self._workers.kill()

    def poll(self) -> bool:
        """Send the driver what is new. Returns False once the fork server has ended."""
        has_ended = self._workers.has_ended()
        self._terminal.pump()
        for event in self._workers.poll():
            if isinstance(event, tuple):
                self._connection.send(WorkerMessageReceived(number=event[0], message=event[1]))
            else:
                self._connection.send(WorkerRecords(records=(event,)))
        if time.monotonic() - self._last_heartbeat_at >= HEARTBEAT_SECONDS:
            self._last_heartbeat_at = time.monotonic()
            self._connection.send(Heartbeat())
        return not has_ended

    def close(self) -> None:
        """End all processes of the job on this host."""
        self._workers.close()
        self._terminal.close()

    def _start_worker(self, command: StartWorker) -> None:
        slot = ElasticSlot(
            number=command.number, host=command.host, slot=command.slot, store_token=self._task.store_token
        )
        task = self._task
        launch = make_elastic_worker(
            self._config, self._profile, task.start, slot, folder=task.folder, interface=self._interface
        )
        for stream in self._profile.shown_streams(self._config, task.folder, [launch.config]):
            self._terminal.add(stream)
        self._workers.start(launch)

    def _show(self, source: Source, data: bytes) -> None:
        self._connection.send(WorkerOutput(source=source, data=data))
