"""One connection between two agents: frames with a length, a number and a proof.

Note [proof]: both sides know the job's token, which never travels. Each sends 32 random bytes; the session's key is
HMAC-SHA-256 of the token over both, and every frame carries the same of that key over its direction, its number in that
direction and its content (RFC 2104). So a frame cannot be forged, changed, left out, repeated, sent back, or taken over
from another session. It can be read: no secret travels on the channel. A frame's length is looked at before its content
is waited for, and is lower until the other side has proven itself.
"""

import hashlib
import hmac
import secrets
import socket
from contextlib import suppress
from typing import Literal

import msgspec

from rankless.launch.rendezvous.messages import PROTOCOL, ClientHello, ControlMessage, ServerHello
from rankless.records.framing import FrameDecoder, FrameFormat, FrameTooLongError

NONCE_BYTES = 32
PROOF_BYTES = 32
FRAME_FORMAT = FrameFormat(">I")
MOST_BYTES_UNPROVEN = 1 << 16
MOST_BYTES = 4 << 20
_READ_BYTES = 1 << 16

Side = Literal["server", "client"]


class ConnectionBrokenError(Exception):
    """The connection cannot be used any more; the text says why, for people."""


class ControlConnection:
    """One side of a connection. Never blocks; raises BrokenOff where the other side is gone, or not who it must be."""

    def __init__(self, connection: socket.socket, *, side: Side, token: bytes) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        with suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._side = side
        self._token = token
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._key: bytes | None = None
        self._sent = self._received = 0
        self._incoming = FrameDecoder(FRAME_FORMAT, max_bytes=MOST_BYTES_UNPROVEN)
        self._outgoing = bytearray()
        self._kept: list[ControlMessage] = []
        self._has_said_all = False
        if side == "client":
            self._put(msgspec.msgpack.encode(ClientHello(nonce=self._nonce)))

    def fileno(self) -> int:
        """What to select on."""
        return self._socket.fileno()

    @property
    def is_proven(self) -> bool:
        """Whether the other side has sent a frame that only who has the token can send."""
        return self._received > 0

    @property
    def is_behind(self) -> bool:
        """Whether there is more to send than the connection has taken."""
        return bool(self._outgoing)

    def send(self, frame: ControlMessage) -> None:
        """Send a frame, or, before the session has its key, keep it until then."""
        if self._key is None:
            self._kept.append(frame)
            return
        data = msgspec.msgpack.encode(frame)
        self._put(self._proof(self._side, self._sent, data) + data)
        self._sent += 1

    def receive(self) -> list[ControlMessage]:
        """The frames that have come; also sends what could not be sent before.

        What came before the other side closed is given first; that it has closed is raised at the next call.
        """
        end: ConnectionBrokenError | None = None
        try:
            self._flush()
        except ConnectionBrokenError as broken:
            end = broken
        try:
            if self._read():
                end = end or ConnectionBrokenError("the connection was closed")
        except ConnectionBrokenError as broken:
            end = end or broken
        frames: list[ControlMessage] = []
        try:
            for data in self._incoming.messages():
                frame = self._opened(data)
                if frame is not None:
                    frames.append(frame)
        except FrameTooLongError as error:
            if not self.is_proven:
                raise ConnectionBrokenError("something that is no agent of Rankless") from None
            raise ConnectionBrokenError(f"a frame of {error.length} bytes, longer than any can be") from None
        if end is not None and not frames:
            raise end
        return frames

    def has_ended(self) -> bool:
        """Having nothing more to say: say so, drop what comes, and whether the other side has closed, too."""
        try:
            self._flush()
            if not self._outgoing and not self._has_said_all:
                self._has_said_all = True
                self._socket.shutdown(socket.SHUT_WR)
            is_over = self._read()
        except (ConnectionBrokenError, OSError):
            return True
        self._incoming.clear()
        return is_over

    def close(self) -> None:
        """Send what can be sent at once, and close."""
        with suppress(ConnectionBrokenError):
            self._flush()
        self._socket.close()

    def _opened(self, data: bytes) -> ControlMessage | None:
        if self._key is None:
            self._agree(data)
            return None
        other: Side = "server" if self._side == "client" else "client"
        proof, content = data[:PROOF_BYTES], data[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(other, self._received, content)):
            raise ConnectionBrokenError(
                "another token" if not self._received else "a frame that was changed or repeated on its way"
            )
        self._received += 1
        self._incoming.max_bytes = MOST_BYTES
        try:
            frame: ControlMessage = msgspec.msgpack.decode(content, type=ControlMessage)
        except msgspec.MsgspecError as error:
            raise ConnectionBrokenError(f"a frame that cannot be read ({error})") from None
        return frame

    def _agree(self, data: bytes) -> None:
        """Take the other side's half of the key."""
        try:
            opening = msgspec.msgpack.decode(data, type=ClientHello | ServerHello)
        except msgspec.MsgspecError:
            raise ConnectionBrokenError("something that is no agent of Rankless") from None
        wanted = ClientHello if self._side == "server" else ServerHello
        if not isinstance(opening, wanted) or len(opening.nonce) != NONCE_BYTES:
            raise ConnectionBrokenError("something that is no agent of Rankless")
        if opening.protocol != PROTOCOL:
            raise ConnectionBrokenError(
                f"an agent of another version of Rankless (protocol {opening.protocol}, here {PROTOCOL})"
            )
        if self._side == "server":
            self._put(msgspec.msgpack.encode(ServerHello(nonce=self._nonce)))
            halves = opening.nonce + self._nonce
        else:
            halves = self._nonce + opening.nonce
        self._key = hmac.digest(self._token, b"rankless control" + halves, hashlib.sha256)
        kept, self._kept = self._kept, []
        for frame in kept:
            self.send(frame)

    def _proof(self, sender: Side, number: int, content: bytes) -> bytes:
        assert self._key is not None
        return hmac.digest(self._key, sender.encode() + number.to_bytes(8, "big") + content, hashlib.sha256)

    def _put(self, data: bytes) -> None:
        if len(data) > MOST_BYTES:
            raise ConnectionBrokenError(f"a frame of {len(data)} bytes would be too long to send")
        self._outgoing += FRAME_FORMAT.encode(data)
        self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            try:
                taken = self._socket.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionBrokenError(f"the connection was lost ({error.strerror or error})") from None
            del self._outgoing[:taken]

    def _read(self) -> bool:
        """Read what has come; True if the other side has closed."""
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
            if self._incoming.buffered_bytes > MOST_BYTES + _READ_BYTES:
                return False  # enough for now: the frames that are whole are taken first
