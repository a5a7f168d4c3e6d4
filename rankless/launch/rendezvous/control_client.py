"""Another host's end of the control channel: its one connection, to host 0."""

import time
from contextlib import suppress

from rankless.launch.rendezvous.connect import HostUnreachableError, connected
from rankless.launch.rendezvous.control_connection import ConnectionBrokenError, ControlConnection
from rankless.launch.rendezvous.control_server import BEAT_SECONDS, SILENT_SECONDS
from rankless.launch.rendezvous.messages import ControlMessage, Heartbeat


class LeaderUnreachableError(Exception):
    """Host 0 does not answer; the text says how, for people."""


class TokenRejectedError(ConnectionBrokenError):
    """Host 0 has closed the connection when it saw this host's proof."""


class LeaderConnection:
    """The connection to host 0. It is selectable; `turn` then gives the frames that have come."""

    def __init__(self, session: ControlConnection) -> None:
        self._session = session
        self._heard = time.monotonic()
        self._beaten = 0.0

    def fileno(self) -> int:
        """What to select on."""
        return self._session.fileno()

    @property
    def is_behind(self) -> bool:
        """Whether there is more to send than the connection has taken."""
        return self._session.is_behind

    def turn(self, now: float) -> list[ControlMessage]:
        """What host 0 has said since the last call; sends signs of life. Raises BrokenOff if it is lost."""
        try:
            frames = self._session.receive()
        except ConnectionBrokenError as broken:
            if not self._session.is_proven:
                raise TokenRejectedError(
                    f"{broken} at this host's proof: is the job's token the same on both?"
                ) from None
            raise
        if frames:
            self._heard = now
        if now - self._heard > SILENT_SECONDS:
            raise ConnectionBrokenError(f"no sign of life for {now - self._heard:.0f} s")
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            self.tell(Heartbeat())
        return frames

    def tell(self, frame: ControlMessage) -> None:
        """Send a frame; what is broken is found when it is listened to."""
        with suppress(ConnectionBrokenError):
            self._session.send(frame)

    def close(self) -> None:
        """Close the connection."""
        self._session.close()


def connect(address: str, port: int, *, token: bytes, timeout_seconds: float) -> ControlConnection:
    """A session with host 0. Raises NotReached, with what happened."""
    try:
        connection = connected(address, port, timeout_seconds=timeout_seconds)
    except HostUnreachableError as unreached:
        raise LeaderUnreachableError(_what_happened(unreached, address, port)) from None
    try:
        return ControlConnection(connection, side="client", token=token)
    except ConnectionBrokenError as broken:
        connection.close()
        raise LeaderUnreachableError(f"{address}:{port}: {broken}") from None


def _what_happened(unreached: HostUnreachableError, address: str, port: int) -> str:
    if unreached.code is None:
        return f"the name {address} does not resolve here"
    if unreached.was_refused:
        return f"nobody listens at {address}:{port}: the job is not started there yet, or with another port"
    if unreached.was_dropped:
        return f"no answer from {address}:{port}: a firewall drops packets, the port is not mapped, or the host is down"
    if unreached.has_no_way:
        return f"no way leads to {address} from here ({unreached}): is the network, or the host, down?"
    return f"{address}:{port}: {unreached}"
