"""What the doctor asks its program on a host, and what that answers: typed lines of JSON."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from rankless.config.collective_test import Here, Reduced, StoreOpened
from rankless.launch.rendezvous.host_facts import HostFacts
from rankless.records.check_results import CheckResult

ConnectionOutcome = Literal["reached", "another", "refused", "dropped", "no way", "no name", "failed"]
"""Of a connection to another host; "another" is a machine that is not the one that was meant."""


class CheckHost(msgspec.Struct, frozen=True, kw_only=True, tag="look"):
    """Look at this host itself."""

    name: str = ""
    """By which the others know this host."""
    others: tuple[str, ...] = ()
    """The job's other hosts, as far as they can be known here, host 0 first."""
    is_first: bool = True
    """Whether it is host 0."""
    has_several: bool = False
    """Whether the job has several hosts."""
    workers: int
    """On this host."""
    port: int
    log_folder: str


class HostReport(msgspec.Struct, frozen=True, kw_only=True, tag="looked"):
    """What this host tells of itself."""

    results: tuple[CheckResult, ...]
    facts: HostFacts
    container: str | None
    """What kind of container it is, if it is one."""
    interface: str | None
    """The network card that a job would use."""
    address: str | None
    """This host's on it."""


class ProbeReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """What the program says first."""

    identity: str
    """Of its host: the same for two names of one only."""


class ApplyEnvironment(msgspec.Struct, frozen=True, kw_only=True, tag="apply"):
    """Take over environment variables, as an agent that ssh starts does."""

    environment: Mapping[str, str]


class ReadClock(msgspec.Struct, frozen=True, kw_only=True, tag="clock"):
    """What is the time?"""


class ClockTime(msgspec.Struct, frozen=True, kw_only=True, tag="time"):
    """The host's clock."""

    seconds: float


class OpenListeners(msgspec.Struct, frozen=True, kw_only=True, tag="listen"):
    """Listen on a free port, for those who know the secret; and on `port` of `address` too, if one is given."""

    host_index: int
    secret: bytes
    port: int | None = None
    address: str = ""


class ListenersOpened(msgspec.Struct, frozen=True, kw_only=True, tag="listening"):
    """Where this host listens."""

    high_port: int
    has_port: bool
    """Whether the port that was asked for could be had."""


class ConnectionTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where another host listens."""

    host_index: int
    address: str
    port: int


class ConnectToTargets(msgspec.Struct, frozen=True, kw_only=True, tag="connect"):
    """Try to reach each of these, at once."""

    targets: tuple[ConnectionTarget, ...]
    secret: bytes


class ConnectionAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One connection to one address of a host."""

    target: ConnectionTarget
    address: str
    """As the name was looked up here."""
    outcome: ConnectionOutcome
    text: str = ""


class ConnectionAttempts(msgspec.Struct, frozen=True, kw_only=True, tag="connected"):
    """How that went."""

    attempts: tuple[ConnectionAttempt, ...]


class MeasureLink(msgspec.Struct, frozen=True, kw_only=True, tag="measure"):
    """How fast is the way to `target`?"""

    target: ConnectionTarget
    secret: bytes


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True, tag="speed"):
    """That way's speed; `error` says where it could not be measured."""

    round_trip_seconds: float = 0.0
    bytes_per_second: float = 0.0
    error: str = ""


class StartCollectiveProcess(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Start the process for a trial collective: it imports torch meanwhile."""


class RelayTask(msgspec.Struct, frozen=True, kw_only=True, tag="relay"):
    """Hand this line to that process, and answer with its own, or with `Failed`."""

    line: bytes
    timeout_seconds: float


class ProbeDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """It is done."""


class ProbeFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """It could not be done, and why."""

    text: str


ProbeRequest = (
    CheckHost
    | ApplyEnvironment
    | ReadClock
    | OpenListeners
    | ConnectToTargets
    | MeasureLink
    | StartCollectiveProcess
    | RelayTask
)
ProbeResponse = (
    ProbeReady
    | HostReport
    | ClockTime
    | ListenersOpened
    | ConnectionAttempts
    | LinkSpeed
    | Here
    | StoreOpened
    | Reduced
    | ProbeDone
    | ProbeFailed
)
