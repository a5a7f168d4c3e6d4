"""The other hosts of a run on several: the followers that host 0 leads, and host 0 as a follower sees it."""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rankless.config.run_config import AgreedJobConfig
from rankless.launch.other_hosts_interface import PeerPollResult, Peers, StopMode
from rankless.launch.rendezvous.control_connection import ConnectionBrokenError, LeaderConnection
from rankless.launch.rendezvous.control_server import (
    ConnectionRejected,
    ControlServer,
    HostDisconnected,
    HostReported,
)
from rankless.launch.rendezvous.messages import (
    HEARTBEAT_SECONDS,
    ControlMessage,
    HostEnded,
    JobEnded,
    JoinRefused,
    KillWorker,
    ProcessesStarted,
    RankStatusRequest,
    RecordingChunk,
    RoleMessage,
    SendToWorker,
    StartRefused,
    StartWorkers,
    StopWorkers,
    WorkerMessageReceived,
    WorkerOutput,
    WorkerRecords,
)
from rankless.launch.worker_output import Source
from rankless.records.elastic_driver_protocol import DriverMessage, WorkerMessage
from rankless.records.events import NO_RANK, AnyRecord, HostInterrupted, HostLost, Notice
from rankless.records.number_formatting import format_seconds
from rankless.records.unauthenticated_client_limits import RejectedClients


class FollowerPeers(Peers):
    """The hosts that host 0 leads, as host 0 sees them."""

    def __init__(self, server: ControlServer, start: AgreedJobConfig, names: Sequence[str]) -> None:
        self._server = server
        self._start = start
        self._names = names
        self._show: Callable[[Source, bytes], None] = lambda _source, _data: None
        self.started_processes: dict[int, ProcessesStarted | StartRefused] = {}
        """What each other host has sent of the start of its processes beside its workers, by host index."""
        self._worker_messages: list[tuple[int, WorkerMessage]] = []
        self._rejections: list[str] = []
        self._rejected = RejectedClients("the port for other hosts", self._rejections.append)

    def set_output_sink(self, show: Callable[[Source, bytes], None]) -> None:
        """Pass the output of other hosts' workers to `show` from now on."""
        self._show = show

    def host_of(self, rank: int) -> int:
        """Return the index of the host on which a rank runs."""
        return self._start.host_of(rank)

    def fileno(self) -> int | None:
        """Return the server's descriptor."""
        return self._server.fileno()

    def poll(self, now: float) -> PeerPollResult:
        """Return the records of all followers; a lost follower gives a `HostLost` record."""
        records: list[AnyRecord] = []
        for event in self._server.poll(now):
            if isinstance(event, HostReported) and isinstance(event.message, WorkerRecords):
                records += event.message.records
            elif isinstance(event, HostReported) and isinstance(event.message, WorkerMessageReceived):
                self._worker_messages.append((event.message.number, event.message.message))
            elif isinstance(event, HostReported) and isinstance(event.message, RecordingChunk):
                write_recording(event.message, self._start)
            elif isinstance(event, HostReported) and isinstance(event.message, WorkerOutput):
                self._show(event.message.source, event.message.data)
            elif isinstance(event, HostReported) and isinstance(event.message, HostEnded):
                self._take_end(event.host, event.message, records)
            elif isinstance(event, HostReported) and isinstance(event.message, ProcessesStarted | StartRefused):
                self.started_processes[event.host] = event.message
            elif isinstance(event, HostDisconnected) and (
                not event.has_ended or self._start.list_processes(event.host)
            ):
                records.append(self._make_lost_record(event.host, f"was lost: {event.reason}"))
            elif isinstance(event, ConnectionRejected):
                self._rejected.add(event.address, event.reason)
        self._rejected.report(time.monotonic())
        texts, self._rejections[:] = list(self._rejections), []
        records += [Notice(rank=0, time_ns=time.monotonic_ns(), text=text) for text in texts]
        return PeerPollResult(records)

    def stop_workers(self, mode: StopMode) -> None:
        """Request all followers to end their workers."""
        self._server.broadcast(StopWorkers(mode=mode))

    def request_rank_status(self) -> None:
        """Request the status of every follower's ranks."""
        self._server.broadcast(RankStatusRequest())

    @property
    def are_running(self) -> bool:
        """Whether a follower has not ended."""
        return bool(self._server.running_hosts)

    def send_to_worker(self, rank: int, message: DriverMessage) -> None:
        """Send a message to a worker of another host."""
        self._server.send(self.host_of(rank), SendToWorker(number=rank, message=message))

    def kill_worker(self, rank: int) -> None:
        """Request the agent of another host to kill a worker."""
        self._server.send(self.host_of(rank), KillWorker(number=rank))

    def take_worker_messages(self) -> list[tuple[int, WorkerMessage]]:
        """Return what workers of other hosts have sent since the last call, each with the worker's rank."""
        taken, self._worker_messages = self._worker_messages, []
        return taken

    def send_job_end(self, exit_code: int, texts: Sequence[str]) -> None:
        """Send each host the job's exit code and its own text, by host index."""
        for host, text in enumerate(texts):
            self._server.send(host, JobEnded(exit_code=exit_code, text=text))

    def start_workers(self) -> None:
        """Let all followers start their workers."""
        self._server.broadcast(StartWorkers())

    def send_to_role(self, role: str, content: Any) -> None:
        """Send plain values to a role of all followers."""
        self._server.broadcast(RoleMessage(role=role, content=content))

    def refuse_start(self, refusal: JoinRefused) -> None:
        """Tell all followers that the job does not start."""
        self._server.broadcast(refusal)

    def _take_end(self, host: int, end: HostEnded, records: list[AnyRecord]) -> None:
        """Add what the end of a host says to `records`."""
        if end.lost_leader:  # the records before this one say how its workers ended, and not why
            pause = self._server.longest_pause_seconds
            more = "" if pause < HEARTBEAT_SECONDS else f". This agent did not run for {format_seconds(pause)}"
            reason = f"was lost: {self._names[host]} had {end.lost_leader} from its agent, and ended its workers{more}"
            records.insert(0, self._make_lost_record(0, reason))
        elif end.interrupted_by is None and end.fork_server_exit_code:
            output = f":\n{end.fork_server_output}" if end.fork_server_output else ""
            reason = f"lost the process that starts its workers (exit code {end.fork_server_exit_code}){output}"
            records.append(self._make_lost_record(host, reason))

    def _make_lost_record(self, host: int, reason: str) -> HostLost:
        rank = _first_rank(self._start, host)
        return HostLost(rank=rank, time_ns=time.monotonic_ns(), host=self._names[host], how=reason, host_index=host)


class LeaderPeer(Peers):
    """Host 0, as a follower sees it."""

    attributes_failures = False

    def __init__(self, connection: LeaderConnection, start: AgreedJobConfig, host_index: int, name: str) -> None:
        self._connection = connection
        self._start = start
        self._host_index = host_index
        self._name = name
        self._has_status_request = False
        self._stop: StopMode | None = None
        self.may_start_workers = False
        """Whether all processes beside the workers of all hosts serve."""
        self._role_messages: list[RoleMessage] = []
        self.refusal: JoinRefused | None = None
        """Why the job does not start, if it does not."""
        self._driver_messages: list[tuple[int, DriverMessage]] = []
        self._to_kill: list[int] = []

    def host_of(self, rank: int) -> int:
        """Return the index of the host on which a rank runs."""
        return self._start.host_of(rank)

    def fileno(self) -> int | None:
        """Return the connection's descriptor, or None once host 0 is lost."""
        return None if self.lost_reason is not None else self._connection.fileno()

    def poll(self, now: float) -> PeerPollResult:
        """Return host 0's request to stop, if there is one. A lost host 0 is such a request too."""
        self.receive(now)
        stop, self._stop = self._stop, None
        return PeerPollResult(stop=stop)

    def receive(self, now: float) -> None:
        """Take what host 0 has sent. The next `poll` returns a request to stop."""
        if self.lost_reason is not None:
            return
        try:
            for message in self._connection.poll(now):
                self._take(message)
        except ConnectionBrokenError as error:
            self.lost_reason = str(error)
            self._stop = None if self.job_end is not None else "lost"

    def _take(self, message: ControlMessage) -> None:
        if isinstance(message, StopWorkers):
            self._stop = message.mode
        elif isinstance(message, RankStatusRequest):
            self._has_status_request = True
        elif isinstance(message, JobEnded):
            self.job_end = (message.exit_code, message.text)
        elif isinstance(message, SendToWorker):
            self._driver_messages.append((message.number, message.message))
        elif isinstance(message, KillWorker):
            self._to_kill.append(message.number)
        elif isinstance(message, StartWorkers):
            self.may_start_workers = True
        elif isinstance(message, RoleMessage):
            self._role_messages.append(message)
        elif isinstance(message, JoinRefused):
            self.refusal = message

    def send_start(self, message: ProcessesStarted | StartRefused) -> None:
        """Send host 0 that this host's processes beside its workers serve, or why they do not."""
        self._connection.send(message)

    def take_role_contents(self, role: str) -> list[Any]:
        """Return what host 0 has sent to a role since the last call, as plain values."""
        taken = [message.content for message in self._role_messages if message.role == role]
        self._role_messages = [message for message in self._role_messages if message.role != role]
        return taken

    def send_records(self, records: Sequence[AnyRecord]) -> None:
        """Send records to host 0."""
        if records:
            self._connection.send(WorkerRecords(records=tuple(records)))

    @property
    def has_unsent_data(self) -> bool:
        """Whether host 0 has not taken everything that was sent."""
        return self._connection.has_unsent_data

    def send_worker_message(self, rank: int, message: WorkerMessage) -> None:
        """Send to host 0 what a worker of this host has sent."""
        self._connection.send(WorkerMessageReceived(number=rank, message=message))

    def take_driver_messages(self) -> list[tuple[int, DriverMessage]]:
        """Return what host 0 has sent to workers of this host since the last call, each with the worker's rank."""
        taken, self._driver_messages = self._driver_messages, []
        return taken

    def take_workers_to_kill(self) -> list[int]:
        """Return the workers of this host that host 0 has requested to kill since the last call."""
        taken, self._to_kill = self._to_kill, []
        return taken

    def send_output(self, source: Source, data: bytes) -> None:
        """Send a worker's output to host 0, which shows it."""
        for start in range(0, len(data), CHUNK_BYTES):
            self._connection.send(WorkerOutput(source=source, data=data[start : start + CHUNK_BYTES]))

    def take_rank_status_request(self) -> bool:
        """Return whether host 0 has requested the status of this host's ranks since the last call."""
        has_request, self._has_status_request = self._has_status_request, False
        return has_request

    def send_interrupt(self, number: int) -> None:
        """Report to host 0 that this host's agent has received a signal."""
        rank = _first_rank(self._start, self._host_index)
        record = HostInterrupted(rank=rank, time_ns=time.monotonic_ns(), host=self._name, signal=number)
        self.send_records([record])

    def send_end(self, *, fork_server_exit_code: int, interrupted_by: int | None) -> None:
        """Send this host's recordings to host 0, then report that nothing is alive here."""
        for chunk in read_recording(self._start, self._host_index):
            self._connection.send(chunk)
        # A lost host 0 receives it once its agent runs again.
        self._connection.send(
            HostEnded(
                fork_server_exit_code=fork_server_exit_code,
                interrupted_by=interrupted_by,
                lost_leader=self.lost_reason or "",
            )
        )

    @property
    def are_running(self) -> bool:
        """True until host 0 has sent the job's end, or is lost."""
        return self.job_end is None and self.lost_reason is None


def _first_rank(start: AgreedJobConfig, host: int) -> int:
    """Return the first rank of a host, or NO_RANK if it has servers alone."""
    return start.first_rank(host) if start.workers[host] else NO_RANK


CHUNK_BYTES = 1 << 20
_FILE_NAME = re.compile(r"rank(\d+)\.(results|safetensors|values)")


def read_recording(start: AgreedJobConfig, host_index: int) -> Iterator[RecordingChunk]:
    """Yield the files that a host's workers have recorded, in chunks."""
    if start.recording is None:
        return
    for path in sorted(Path(start.recording).glob("rank*")):
        match = _FILE_NAME.fullmatch(path.name)
        if match is None or int(match[1]) >= start.world_size or start.host_of(int(match[1])) != host_index:
            continue
        with path.open("rb") as file:
            data = file.read(CHUNK_BYTES)
            while True:
                next_data = file.read(CHUNK_BYTES)
                yield RecordingChunk(name=path.name, data=data, is_last=not next_data)
                if not next_data:
                    break
                data = next_data


def write_recording(chunk: RecordingChunk, start: AgreedJobConfig) -> None:
    """Append a chunk of a file in the folder where this host's workers record. The last chunk completes the file."""
    match = _FILE_NAME.fullmatch(chunk.name)
    if match is None or start.recording is None or int(match[1]) >= start.world_size:
        return
    folder = Path(start.recording)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{chunk.name}.partial"
    with partial.open("ab") as file:
        file.write(chunk.data)
    if chunk.is_last:
        os.replace(partial, folder / chunk.name)  # on a shared disk the file exists already
