"""The workers of an elastic job on another host, started by an agent that ssh starts there."""

import os
import selectors
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from rankless.config.run_config import Elastic
from rankless.extensions.horovodrun.elastic.ssh_protocol import (
    HEARTBEAT_SECONDS,
    HEARTBEAT_TIMEOUT_SECONDS,
    AgentEvent,
    AgentFailed,
    AgentReady,
    HostTask,
    KillIfStalled,
    KillWorkers,
    PipeConnection,
    SignalWorkers,
    StartWorker,
)
from rankless.launch.recovery.membership import ElasticWorker
from rankless.launch.rendezvous.host_consistency import find_version_differences, installed_versions
from rankless.launch.rendezvous.messages import (
    Heartbeat,
    SendToWorker,
    WorkerMessageReceived,
    WorkerOutput,
    WorkerRecords,
)
from rankless.launch.rendezvous.ssh import SSH_OPTIONS
from rankless.launch.worker_output import Source, Write
from rankless.records.elastic_driver_protocol import DriverMessage, WorkerMessage
from rankless.records.events import AnyRecord, Exited, HostLost
from rankless.runtime.subprocess_command import python_command

# A lost host should be noticed soon. If an option has two values, ssh uses the first.
_OPTIONS = ("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3", *SSH_OPTIONS)
AGENT_START_SECONDS = 60.0


class RemoteWorkers:
    """The workers of one other host, with the interface of `LocalWorkers`."""

    def __init__(
        self,
        host: str,
        task: HostTask,
        elastic: Elastic,
        *,
        selector: selectors.BaseSelector,
        writes: Mapping[Source, Write],
    ) -> None:
        self._host = host
        self._selector = selector
        self._writes = writes
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it
        self._process = _start_ssh(host, elastic, self._errors.fileno())
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._connection = PipeConnection(self._process.stdout.fileno(), self._process.stdin.fileno())
        self._connection.send(task)
        self._numbers: set[int] = set()
        self._last_received_at = time.monotonic() + AGENT_START_SECONDS
        self._last_heartbeat_at = 0.0
        self._is_registered = True
        self._failure = ""
        """Why the host cannot take part; empty while it can."""
        selector.register(self._connection, selectors.EVENT_READ)
        self.is_lost = False
        """Whether `poll` has reported the loss of the host."""
        self.lost_workers: list[int] = []
        """The workers that were lost with the host."""
        self.agent: AgentReady | None = None
        """The agent's first event; None until the agent runs."""

    def start(self, worker: ElasticWorker) -> None:
        """Start a worker."""
        self._numbers.add(worker.number)
        self._connection.send(StartWorker(number=worker.number, host=worker.host, slot=worker.slot))

    def send(self, number: int, message: DriverMessage) -> None:
        """Send a message to a worker."""
        self._connection.send(SendToWorker(number=number, message=message))

    def poll(self) -> Iterator[tuple[int, WorkerMessage] | AnyRecord]:
        """Yield new messages and records. If the host is lost, yield the end of all its workers."""
        now = time.monotonic()
        if now - self._last_heartbeat_at >= HEARTBEAT_SECONDS:
            self._last_heartbeat_at = now
            self._connection.send(Heartbeat())
        for event in self._connection.receive(AgentEvent):
            self._last_received_at = max(self._last_received_at, now) if self.agent is None else now
            if isinstance(event, AgentReady):
                self.agent, self._last_received_at = event, now
                self._check_versions(event)
            elif isinstance(event, AgentFailed):
                self._failure = event.reason
            elif isinstance(event, WorkerMessageReceived):
                yield event.number, event.message
            elif isinstance(event, WorkerRecords):
                self._numbers -= {record.rank for record in event.records if isinstance(record, Exited)}
                yield from event.records
            elif isinstance(event, WorkerOutput):
                self._writes[event.source](event.data)
        if self.has_ended():
            yield from self._lose_workers()

    def explain_loss(self) -> str:
        """Return why the host was lost."""
        self._errors.seek(0)
        text = self._failure or self._errors.read().decode(errors="replace").strip()[-300:]
        return text or ("no heartbeat" if self._process.poll() is None else f"ssh ended with {self._process.poll()}")

    def kill_if_stalled(self, number: int, reason: str) -> None:
        """Kill one worker as soon as it makes no progress."""
        self._connection.send(KillIfStalled(number=number, reason=reason))

    def signal(self, number: int) -> None:
        """Send a signal to all workers, and start no others."""
        if self.agent is None:
            self._cancel_start()
        else:
            self._connection.send(SignalWorkers(signal=number))

    def kill(self) -> None:
        """Kill all workers."""
        self._connection.send(KillWorkers())

    def has_ended(self) -> bool:
        """Whether nothing will arrive from the host any more."""
        is_silent = time.monotonic() - self._last_received_at > HEARTBEAT_TIMEOUT_SECONDS
        return bool(self._failure) or self._connection.is_closed or is_silent

    def close(self) -> None:
        """Close the connection to the host. Its agent then ends everything there."""
        self._unregister()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _lose_workers(self) -> Iterator[AnyRecord]:
        self._unregister()
        self.is_lost = True
        self.lost_workers += sorted(self._numbers)
        for number in sorted(self._numbers):
            now_ns = time.monotonic_ns()
            how = f"was lost: {self.explain_loss()}"
            yield HostLost(rank=number, time_ns=now_ns, host=self._host, how=how)
            yield Exited(rank=number, time_ns=now_ns, exit_code=-signal.SIGKILL)
        self._numbers.clear()

    def _cancel_start(self) -> None:
        """Kill ssh before the agent runs. An agent that starts anyway finds its connection closed, and ends."""
        self._process.kill()
        self._failure = "the job ended before the agent had started"

    def _check_versions(self, agent: AgentReady) -> None:
        differences = find_version_differences(installed_versions(), agent.versions)
        self._failure = "; ".join(
            f"{each.what} is {each.there}, expected {each.here}: {each.fix}" for each in differences
        )

    def _unregister(self) -> None:
        if self._is_registered:
            self._is_registered = False
            self._selector.unregister(self._connection)


def _start_ssh(host: str, elastic: Elastic, error_descriptor: int) -> subprocess.Popen[bytes]:
    """Start the agent on another host, in the same folder and with the same interpreter as here."""
    agent_command = shlex.join(python_command("rankless.extensions.horovodrun.elastic.host_agent"))
    command = f"cd {shlex.quote(os.getcwd())} && exec {agent_command}"
    port = [] if elastic.ssh_port is None else ["-p", str(elastic.ssh_port)]
    identity = [] if elastic.ssh_identity_file is None else ["-i", elastic.ssh_identity_file]
    return subprocess.Popen(
        ["ssh", *port, *identity, *_OPTIONS, host, "--", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=error_descriptor,
        start_new_session=True,
    )
