"""The messages between the agents of several hosts: one tagged union, decoded by type and never unpickled."""

from typing import Any

import msgspec

from rankless.config.run_config import AgreedJobConfig
from rankless.launch.other_hosts_interface import StopMode
from rankless.launch.rendezvous.host_consistency import HostFacts
from rankless.launch.worker_output import Source
from rankless.records.elastic_driver_protocol import DriverMessage, WorkerMessage
from rankless.records.events import AnyRecord
from rankless.records.host_connection_tests import ConnectionAttempt, ConnectionTarget
from rankless.records.live_run import ProcessRow

PROTOCOL = 6
HEARTBEAT_SECONDS = 1.0
HEARTBEAT_TIMEOUT_SECONDS = 4.0
"""An agent that sends nothing for so long counts as lost."""


class ClientHello(msgspec.Struct, frozen=True, kw_only=True, tag="greeting"):
    """The client's first message, not authenticated: its protocol and its half of the session key.

    The tags of the two hello messages and `protocol` never change, so agents of different versions recognize each
    other.
    """

    protocol: int = PROTOCOL
    nonce: bytes


class ServerHello(msgspec.Struct, frozen=True, kw_only=True, tag="challenge"):
    """The server's answer, not authenticated: the other half of the key. All later frames are authenticated."""

    protocol: int = PROTOCOL
    nonce: bytes


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, tag="join_request"):
    """A host asks to join the job."""

    host: int
    """The index in the list of hosts, or UNKNOWN_HOST."""
    facts: HostFacts


class JoinRefused(msgspec.Struct, frozen=True, kw_only=True, tag="join_refused"):
    """Host 0 does not start the job."""

    expected: str
    found: str
    fix: str


class JobStarted(msgspec.Struct, frozen=True, kw_only=True, tag="job_started"):
    """All hosts have joined and agree. Each starts its workers."""

    start: AgreedJobConfig
    host_index: int
    """The index of the receiving host."""


class JoinProgress(msgspec.Struct, frozen=True, kw_only=True, tag="join_progress"):
    """The missing hosts, for the users at the other hosts."""

    text: str


class RoleMessage(msgspec.Struct, frozen=True, kw_only=True, tag="role"):
    """A message between the agents about the processes of a role, which alone knows what is in it."""

    role: str
    content: Any
    """Plain values, as `msgspec.to_builtins` returns them."""


class StartRefused(msgspec.Struct, frozen=True, kw_only=True, tag="start_refused"):
    """A process of the sender beside its workers does not serve."""

    expected: str
    found: str
    fix: str


class ProcessesStarted(msgspec.Struct, frozen=True, kw_only=True, tag="processes_started"):
    """All processes of the sender beside its workers serve."""

    processes: tuple[ProcessRow, ...]


class StartWorkers(msgspec.Struct, frozen=True, kw_only=True, tag="start_workers"):
    """All processes beside the workers of all hosts serve. The receiver starts its workers."""


class OpenPort(msgspec.Struct, frozen=True, kw_only=True, tag="open_port"):
    """The receiver listens on a free port, and on the given ones, for clients that know the secret."""

    secret: bytes
    host_index: int
    """The index of the receiving host."""
    ports: tuple[tuple[str, int], ...] = ()
    """The addresses and ports of the receiver's processes beside its workers, which do not run yet."""


class PortOpened(msgspec.Struct, frozen=True, kw_only=True, tag="port_opened"):
    """Where the sender listens."""

    address: str
    port: int


class ConnectToPorts(msgspec.Struct, frozen=True, kw_only=True, tag="try_ports"):
    """The receiver connects to all of these at once."""

    targets: tuple[ConnectionTarget, ...]


class PortsTried(msgspec.Struct, frozen=True, kw_only=True, tag="ports_tried"):
    """The outcomes of the sender's connections."""

    attempts: tuple[ConnectionAttempt, ...]


class WorkerRecords(msgspec.Struct, frozen=True, kw_only=True, tag="worker_records"):
    """Records of a host's workers, in order."""

    records: tuple[AnyRecord, ...]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """The sender is alive."""


class RankStatusRequest(msgspec.Struct, frozen=True, kw_only=True, tag="rank_status_request"):
    """Some rank of the job has stalled. The receiver answers with a `RankStatus` record for each of its ranks."""


class StopWorkers(msgspec.Struct, frozen=True, kw_only=True, tag="stop_workers"):
    """End the workers."""

    mode: StopMode


class HostEnded(msgspec.Struct, frozen=True, kw_only=True, tag="host_ended"):
    """No process of the job is alive on a host; `interrupted_by` is the signal that its agent received."""

    fork_server_exit_code: int | None = None
    interrupted_by: int | None = None
    fork_server_output: str = ""
    """The last output of the workers' fork server, if it failed."""
    lost_leader: str = ""
    """Why the host had lost host 0 before its workers ended; "" if it had not."""


class RecordingChunk(msgspec.Struct, frozen=True, kw_only=True, tag="recording_chunk"):
    """A chunk of a file that a worker has written for `rankless verify`."""

    name: str
    data: bytes
    is_last: bool


class WorkerOutput(msgspec.Struct, frozen=True, kw_only=True, tag="worker_output"):
    """Output of a host's workers, for host 0 to show if the launcher profile wants the output of all hosts."""

    source: Source
    data: bytes


class SendToWorker(msgspec.Struct, frozen=True, kw_only=True, tag="send_to_worker"):
    """Pass a message to a worker."""

    number: int
    message: DriverMessage


class KillWorker(msgspec.Struct, frozen=True, kw_only=True, tag="kill_worker"):
    """Kill a worker that holds up the others, which can continue without it."""

    number: int


class WorkerMessageReceived(msgspec.Struct, frozen=True, kw_only=True, tag="worker_message"):
    """A worker has sent a message."""

    number: int
    message: WorkerMessage


class JobEnded(msgspec.Struct, frozen=True, kw_only=True, tag="job_ended"):
    """The job has ended on all hosts, with this exit code. The receiving host shows `text`."""

    exit_code: int
    text: str = ""


ControlMessage = (
    ClientHello
    | ServerHello
    | JoinRequest
    | JoinRefused
    | JobStarted
    | JoinProgress
    | RoleMessage
    | StartRefused
    | ProcessesStarted
    | StartWorkers
    | OpenPort
    | PortOpened
    | ConnectToPorts
    | PortsTried
    | WorkerRecords
    | Heartbeat
    | RankStatusRequest
    | StopWorkers
    | RecordingChunk
    | WorkerOutput
    | SendToWorker
    | KillWorker
    | WorkerMessageReceived
    | HostEnded
    | JobEnded
)
