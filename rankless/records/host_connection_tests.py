"""Connections from one host to another, tried before a job: where, with which outcome, and how fast."""

from typing import Literal

import msgspec

ConnectionOutcome = Literal["reached", "another", "refused", "dropped", "no route", "no name", "silent", "failed"]
"""Outcome of a connection to another host.

"another" is a machine that is not the target. "silent" is one that accepts the connection and sends nothing in time.
"""


class ConnectionTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where another host listens."""

    host_index: int
    address: str
    port: int
    has_probe: bool = True
    """Whether a listener of `rendezvous.connect_and_measure` answers there. If not, only a connection is tried."""


class ConnectionAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One connection to one address of a host."""

    target: ConnectionTarget
    address: str
    """The address to which the target's name resolved on the connecting host."""
    outcome: ConnectionOutcome
    text: str = ""


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True, tag="speed"):
    """Response: the link's latency and throughput; `error` says why it could not be measured."""

    round_trip_seconds: float = 0.0
    bytes_per_second: float = 0.0
    error: str = ""


class UsedPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port that a process of the run will have."""

    host_index: int
    address: str
    """The numeric address."""
    port: int
    use: str
    """What the port is for, such as "server 1"."""
