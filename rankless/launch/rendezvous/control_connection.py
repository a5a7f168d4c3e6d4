"""One authenticated connection between two agents.

Note [authentication]: both sides know the job's token, which is never sent. Each side sends 32 random bytes. The
session key is HMAC-SHA-256 of the token over both. Every later frame starts with an authentication tag: HMAC-SHA-256 of
the session key over the frame's direction, its number in that direction, and its content (RFC 2104). An attacker
therefore cannot forge, change, drop, repeat or reflect a frame, and cannot replay one from another session. Frames are
not encrypted, so no secret may be sent. The receiver checks a frame's length before it waits for the content; the limit
is lower until the other side has authenticated itself.
"""

import hashlib
import hmac
import secrets
import socket
import time
from contextlib import suppress
from typing import Literal

import msgspec

from rankless.launch.rendezvous.messages import (
    HEARTBEAT_SECONDS,
    HEARTBEAT_TIMEOUT_SECONDS,
    PROTOCOL,
    ClientHello,
    ControlMessage,
    Heartbeat,
    ServerHello,
)
from rankless.launch.rendezvous.tcp_connect_and_reachability import HostUnreachableError, open_connection
from rankless.records.encoding import encode_msgpack
from rankless.records.framing import FrameDecoder, FrameFormat, FrameTooLongError

NONCE_BYTES = 32
TAG_BYTES = 32
FRAME_FORMAT = FrameFormat(">I")
MAX_UNAUTHENTICATED_BYTES = 1 << 16
MAX_FRAME_BYTES = 4 << 20
_READ_BYTES = 1 << 16
_NOT_AN_AGENT = "not a Rankless agent"

Side = Literal["server", "client"]


class ConnectionBrokenError(Exception):
    """The connection is unusable. The text explains why."""


class DifferentTokenError(ConnectionBrokenError):
    """The other side has another token."""


class ControlConnection:
    """One side of a connection. It never blocks.

    Its methods raise `ConnectionBrokenError` if the other side is gone or fails to authenticate itself.
    """

    def __init__(self, connection: socket.socket, *, side: Side, token: bytes) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        with suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._side = side
        self._token = token
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._session_key: bytes | None = None
        self._sent_count = self._received_count = 0
        self._incoming = FrameDecoder(FRAME_FORMAT, max_bytes=MAX_UNAUTHENTICATED_BYTES)
        self._outgoing = bytearray()
        self._queued_until_key: list[ControlMessage] = []
        self._is_write_closed = False
        if side == "client":
            self._put(encode_msgpack(ClientHello(nonce=self._nonce)))

    def fileno(self) -> int:
        """Return the descriptor for a selector."""
        return self._socket.fileno()

    @property
    def is_authenticated(self) -> bool:
        """Whether the other side has sent a frame that only a holder of the token can send."""
        return self._received_count > 0

    @property
    def has_unsent_data(self) -> bool:
        """Whether the socket has not taken everything that was sent."""
        return bool(self._outgoing)

    def send(self, message: ControlMessage) -> None:
        """Send a message. Until the session key exists, the message waits in a queue."""
        if self._session_key is None:
            self._queued_until_key.append(message)
            return
        content = encode_msgpack(message)
        self._put(self._compute_tag(self._side, self._sent_count, content) + content)
        self._sent_count += 1

    def receive(self) -> list[ControlMessage]:
        """Return the messages that have arrived, and send what could not be sent before.

        If the other side has closed, the messages before that are returned first. The next call raises.
        """
        failure: ConnectionBrokenError | None = None
        try:
            self._flush()
        except ConnectionBrokenError as error:
            failure = error
        try:
            if self._read():
                failure = failure or ConnectionBrokenError("the connection was closed")
        except ConnectionBrokenError as error:
            failure = failure or error
        messages: list[ControlMessage] = []
        try:
            for frame in self._incoming.messages():
                message = self._decode(frame)
                if message is not None:
                    messages.append(message)
        except FrameTooLongError as error:
            if not self.is_authenticated:
                raise ConnectionBrokenError(_NOT_AN_AGENT) from None
            raise ConnectionBrokenError(f"a frame of {error.length} bytes, above the limit") from None
        if failure is not None and not messages:
            raise failure
        return messages

    def finish_closing(self) -> bool:
        """Close the sending direction, drop all input, and return whether the other side has closed too."""
        try:
            self._flush()
            if not self._outgoing and not self._is_write_closed:
                self._is_write_closed = True
                self._socket.shutdown(socket.SHUT_WR)
            is_closed = self._read()
        except (ConnectionBrokenError, OSError):
            return True
        self._incoming.clear()
        return is_closed

    def close(self) -> None:
        """Send what can be sent at once, and close."""
        with suppress(ConnectionBrokenError):
            self._flush()
        self._socket.close()

    def _decode(self, frame: bytes) -> ControlMessage | None:
        if self._session_key is None:
            self._exchange_keys(frame)
            return None
        other: Side = "server" if self._side == "client" else "client"
        tag, content = frame[:TAG_BYTES], frame[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._compute_tag(other, self._received_count, content)):
            if self._side == "server" and not self.is_authenticated:
                self.send(Heartbeat())  # with it the client finds that the tokens differ
            if not self.is_authenticated:
                raise DifferentTokenError("a different token")
            raise ConnectionBrokenError("a frame that was modified or repeated in transit")
        self._received_count += 1
        self._incoming.max_bytes = MAX_FRAME_BYTES
        try:
            message: ControlMessage = msgspec.msgpack.decode(content, type=ControlMessage)
        except msgspec.MsgspecError as error:
            raise ConnectionBrokenError(f"a frame that cannot be decoded ({error})") from None
        return message

    def _exchange_keys(self, frame: bytes) -> None:
        """Read the other side's nonce, derive the session key, and send the queued messages."""
        try:
            hello = msgspec.msgpack.decode(frame, type=ClientHello | ServerHello)
        except msgspec.MsgspecError:
            raise ConnectionBrokenError(_NOT_AN_AGENT) from None
        expected = ClientHello if self._side == "server" else ServerHello
        if not isinstance(hello, expected) or len(hello.nonce) != NONCE_BYTES:
            raise ConnectionBrokenError(_NOT_AN_AGENT)
        if hello.protocol != PROTOCOL:
            raise ConnectionBrokenError(
                f"an agent of another version of Rankless (protocol {hello.protocol}, expected {PROTOCOL})"
            )
        if self._side == "server":
            self._put(encode_msgpack(ServerHello(nonce=self._nonce)))
            nonces = hello.nonce + self._nonce
        else:
            nonces = self._nonce + hello.nonce
        self._session_key = hmac.digest(self._token, b"rankless control" + nonces, hashlib.sha256)
        queued, self._queued_until_key = self._queued_until_key, []
        for message in queued:
            self.send(message)

    def _compute_tag(self, sender: Side, number: int, content: bytes) -> bytes:
        assert self._session_key is not None
        return hmac.digest(self._session_key, sender.encode() + number.to_bytes(8, "big") + content, hashlib.sha256)

    def _put(self, content: bytes) -> None:
        if len(content) > MAX_FRAME_BYTES:
            raise ConnectionBrokenError(f"a frame of {len(content)} bytes is too long to send")
        self._outgoing += FRAME_FORMAT.encode(content)
        self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            try:
                sent_bytes = self._socket.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionBrokenError(f"the connection was lost ({error.strerror or error})") from None
            del self._outgoing[:sent_bytes]

    def _read(self) -> bool:
        """Read what has arrived. Returns True if the other side has closed."""
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return False
            except OSError as error:
                raise ConnectionBrokenError(f"the connection was lost ({error.strerror or error})") from None
            if not data:
                return True
            self._incoming.feed(data)
            if self._incoming.buffered_bytes > MAX_FRAME_BYTES + _READ_BYTES:
                return False  # decode the complete frames before reading more


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
