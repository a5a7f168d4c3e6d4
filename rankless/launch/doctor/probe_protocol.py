"""Requests to a probe server and its responses: typed lines of JSON."""

from collections.abc import Mapping

import msgspec

from rankless.launch.rendezvous.host_consistency import HostFacts
from rankless.records.doctor_records import AllReduceResult, CheckResult, StoreServedMessage, TorchImported
from rankless.records.host_connection_tests import ConnectionAttempt, ConnectionTarget, LinkSpeed


class CheckHost(msgspec.Struct, frozen=True, kw_only=True, tag="look"):
    """Request: run the checks of this host."""

    name: str = ""
    """The name by which the others know this host."""
    others: tuple[str, ...] = ()
    """The job's other hosts that are known here, host 0 first."""
    is_first: bool = True
    """Whether this is host 0."""
    has_several: bool = False
    """Whether the job has several hosts."""
    workers: int
    """Workers on this host."""
    port: int
    log_folder: str


class HostReport(msgspec.Struct, frozen=True, kw_only=True, tag="looked"):
    """Response: the results of a host's checks, and facts for comparison with other hosts."""

    results: tuple[CheckResult, ...]
    facts: HostFacts
    container: str | None
    """The kind of container that the host is, if any."""
    interface: str | None
    """The network card that a job would use."""
    address: str | None
    """This host's address on that card."""


class ProbeReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The first message of a probe server."""

    identity: str
    """Equal for two names of one host."""


class ApplyEnvironment(msgspec.Struct, frozen=True, kw_only=True, tag="apply"):
    """Request: set environment variables, as an agent does that ssh starts."""

    environment: Mapping[str, str]


class ReadClock(msgspec.Struct, frozen=True, kw_only=True, tag="clock"):
    """Request: read the host's clock."""


class ClockTime(msgspec.Struct, frozen=True, kw_only=True, tag="time"):
    """Response: the host's clock, in seconds since the epoch."""

    seconds: float


class OpenListeners(msgspec.Struct, frozen=True, kw_only=True, tag="listen"):
    """Request: listen on a free port for clients that know the secret, and on `port` of `address` if it is given."""

    host_index: int
    secret: bytes
    port: int | None = None
    address: str = ""


class ListenersOpened(msgspec.Struct, frozen=True, kw_only=True, tag="listening"):
    """Response: where this host listens."""

    high_port: int
    has_port: bool
    """Whether the requested port was available."""


class ConnectToTargets(msgspec.Struct, frozen=True, kw_only=True, tag="connect"):
    """Request: connect to all of these at once."""

    targets: tuple[ConnectionTarget, ...]
    secret: bytes


class ConnectionAttempts(msgspec.Struct, frozen=True, kw_only=True, tag="connected"):
    """Response: the outcomes of all connections."""

    attempts: tuple[ConnectionAttempt, ...]


class MeasureLink(msgspec.Struct, frozen=True, kw_only=True, tag="measure"):
    """Request: measure the link to `target`."""

    target: ConnectionTarget
    secret: bytes


class StartCollectiveProcess(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Request: start the process for the collective test, which imports torch meanwhile."""


class RelayTask(msgspec.Struct, frozen=True, kw_only=True, tag="relay"):
    """Request: pass this line to that process, and respond with its answer or with `ProbeFailed`."""

    line: bytes
    timeout_seconds: float


class CheckExtension(msgspec.Struct, frozen=True, kw_only=True, tag="check_extension"):
    """Request: make the check that an extension declares."""

    extension: str


class ExtensionChecked(msgspec.Struct, frozen=True, kw_only=True, tag="extension_checked"):
    """Response: what was found."""

    result: CheckResult


class ProbeDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Response: the request was carried out."""


class ProbeFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Response: the request failed, and why."""

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
    | CheckExtension
)
ProbeResponse = (
    ProbeReady
    | HostReport
    | ClockTime
    | ListenersOpened
    | ConnectionAttempts
    | LinkSpeed
    | TorchImported
    | StoreServedMessage
    | AllReduceResult
    | ExtensionChecked
    | ProbeDone
    | ProbeFailed
)
