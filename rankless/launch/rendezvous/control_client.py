"""The end of the control channel on every host except host 0: one connection to host 0."""

import time
from contextlib import suppress

from rankless.launch.rendezvous.control_connection import ConnectionBrokenError, ControlConnection, DifferentTokenError
from rankless.launch.rendezvous.messages import (
    HEARTBEAT_SECONDS,
    HEARTBEAT_TIMEOUT_SECONDS,
    ControlMessage,
    Heartbeat,
)
from rankless.launch.rendezvous.reachability import HostUnreachableError, open_connection


class LeaderUnreachableError(Exception):
    """Host 0 does not answer. The text explains why."""


class TokenRejectedError(ConnectionBrokenError):
    """Host 0 has another token than this host."""


class LeaderConnection:
    """The connection to host 0. A selector can wait for it; `poll` then returns the messages that have arrived."""

    def __init__(self, connection: ControlConnection) -> None:
        self._connection = connection
        self._last_received_at = time.monotonic()
        self._last_heartbeat_at = 0.0

    def fileno(self) -> int:
        """Return the descriptor for a selector."""
        return self._connection.fileno()

    @property
    def has_unsent_data(self) -> bool:
        """Whether host 0 has not taken everything that was sent."""
        return self._connection.has_unsent_data

    def poll(self, now: float) -> list[ControlMessage]:
        """Return the messages since the last call, and send a heartbeat if one is due.

        Raises `ConnectionBrokenError` if the connection is lost.
        """
        try:
            messages = self._connection.receive()
        except DifferentTokenError as error:
            raise TokenRejectedError(f"{error} at this host's authentication: do both have the same token?") from None
        except ConnectionBrokenError as error:
            if not self._connection.is_authenticated:  # other clients may have taken this one's place
                raise LeaderUnreachableError(f"{error} before host 0 had authenticated itself") from None
            raise
        if messages:
            self._last_received_at = now
        if now - self._last_received_at > HEARTBEAT_TIMEOUT_SECONDS:
            raise ConnectionBrokenError(f"no heartbeat for {now - self._last_received_at:.0f} s")
        if now - self._last_heartbeat_at >= HEARTBEAT_SECONDS:
            self._last_heartbeat_at = now
            self.send(Heartbeat())
        return messages

    def send(self, message: ControlMessage) -> None:
        """Send a message. A broken connection raises at the next `poll`, not here."""
        with suppress(ConnectionBrokenError):
            self._connection.send(message)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def connect_to_leader(address: str, port: int, *, token: bytes, timeout_seconds: float) -> ControlConnection:
    """Open a control connection to host 0. Raises `LeaderUnreachableError` with the reason."""
    try:
        connection = open_connection(address, port, timeout_seconds=timeout_seconds)
    except HostUnreachableError as error:
        raise LeaderUnreachableError(_explain(error, address, port)) from None
    try:
        return ControlConnection(connection, side="client", token=token)
    except ConnectionBrokenError as error:
        connection.close()
        raise LeaderUnreachableError(f"{address}:{port}: {error}") from None


def _explain(error: HostUnreachableError, address: str, port: int) -> str:
    if error.code is None:
        return f"the name {address} does not resolve here"
    if error.was_refused:
        return f"no process listens at {address}:{port}: the job is not started there yet, or with another port"
    if error.has_timed_out:
        return f"no answer from {address}:{port}: a firewall drops packets, the port is not mapped, or the host is down"
    if error.has_no_route:
        return f"no route to {address} from here ({error}): is the network, or the host, down?"
    return f"{address}:{port}: {error}"
