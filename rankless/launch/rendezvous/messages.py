"""What agents of several hosts say to each other, as one tagged union; decoded with types, never unpickled."""

from typing import Literal

import msgspec

from rankless.config.run_config import JobStart
from rankless.launch.rendezvous.host_facts import HostFacts
from rankless.launch.worker_output import Source
from rankless.records.events import AnyRecord

PROTOCOL = 1

StopMode = Literal["stop", "interrupt", "lost", "kill"]


class ClientHello(msgspec.Struct, frozen=True, kw_only=True, tag="greeting"):
    """The first word of who connects, not yet proven: which protocol it speaks, and its half of the session's key."""

    protocol: int = PROTOCOL
    nonce: bytes


class ServerHello(msgspec.Struct, frozen=True, kw_only=True, tag="challenge"):
    """The answer, not yet proven either: the other half. From here on every frame is."""

    protocol: int = PROTOCOL
    nonce: bytes


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, tag="here"):
    """A host has come to the job."""

    host: int
    """Its place in the list of hosts, or UNKNOWN_HOST."""
    facts: HostFacts


class JoinRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Host 0 does not start the job, and why."""

    expected: str
    found: str
    fix: str


class JobStarted(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """All hosts are there and agree: start the workers."""

    start: JobStart
    host_index: int
    """The host's that is told."""


class JoinProgress(msgspec.Struct, frozen=True, kw_only=True, tag="waiting"):
    """Who is missing still, for those who wait on other hosts."""

    text: str


class WorkerRecords(msgspec.Struct, frozen=True, kw_only=True, tag="happened"):
    """Records of a host's workers, in their order."""

    records: tuple[AnyRecord, ...]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """A sign of life."""


class RankStatusRequest(msgspec.Struct, frozen=True, kw_only=True, tag="where_are_you"):
    """Some rank of the job has stood still for long: tell where each of yours is, by `Where` records."""


class StopWorkers(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End the workers: politely, as Ctrl-C does, because a host is lost, or at once."""

    how: StopMode


class HostEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Nothing of the job is alive any more on a host; `interrupted_by` is the signal that told its agent to end."""

    parent_exit_code: int | None = None
    interrupted_by: int | None = None
    last_words: str = ""
    """Of the workers' parent, if it failed."""


class RecordingChunk(msgspec.Struct, frozen=True, kw_only=True, tag="recorded"):
    """A piece of a file that a worker has written for `rankless verify`."""

    name: str
    data: bytes
    is_last: bool


class WorkerOutput(msgspec.Struct, frozen=True, kw_only=True, tag="shown"):
    """What a host's workers have written, for host 0 to show; only under horovodrun, which shows all of it."""

    source: Source
    data: bytes


class JobEnded(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """The job is over everywhere: what its exit code is, and what the host shows of its end."""

    exit_code: int
    text: str = ""


ControlMessage = (
    ClientHello
    | ServerHello
    | JoinRequest
    | JoinRefused
    | JobStarted
    | JoinProgress
    | WorkerRecords
    | Heartbeat
    | RankStatusRequest
    | StopWorkers
    | RecordingChunk
    | WorkerOutput
    | HostEnded
    | JobEnded
)
