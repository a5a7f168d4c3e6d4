"""What the driver and the agent of another host say to each other through ssh, as two tagged unions of typed frames.

ssh has proven who both sides are, and encrypts. A frame is its length and its content; what a login shell prints before
the first one is passed over.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from rankless.config.run_config import JobStart, Program, RunRequest
from rankless.launch.worker_output import Source
from rankless.records.elastic_messages import DriverMessage, WorkerMessage
from rankless.records.events import AnyRecord
from rankless.records.framing import FrameDecoder, FrameFormat, FrameTooLongError

BEAT_SECONDS = 1.0
SILENT_SECONDS = 8.0
"""Without a word for so long, the other side is lost."""
_HAIL = b"\0rankless elastic 1\0"
_FRAME_FORMAT = FrameFormat(">I")
_MOST_BYTES = 16 << 20


class Task(msgspec.Struct, frozen=True, kw_only=True, tag="task"):
    """What the host is to do."""

    program: Program
    request: RunRequest
    start: JobStart
    folder: str
    """For log files."""
    environment: dict[str, str]


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="order"):
    """Start a worker."""

    number: int
    host: str
    slot: int


class Say(msgspec.Struct, frozen=True, kw_only=True, tag="say"):
    """Say something to a worker."""

    number: int
    word: DriverMessage


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """End one worker, unless it computes."""

    number: int
    why: str


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag="signal"):
    """Send all workers a signal; they are to end."""

    number: int


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag="kill"):
    """End all workers at once."""


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """A sign of life."""


class Here(msgspec.Struct, frozen=True, kw_only=True, tag="here"):
    """The agent is there, and how it was reached."""

    address: str
    """Its host's, by which the driver's host reaches it."""
    interface: str
    driver_address: str
    versions: Mapping[str, str]
    """Of Python, torch, NCCL and Rankless."""


class Unable(msgspec.Struct, frozen=True, kw_only=True, tag="unable"):
    """The host cannot take part."""

    why: str


class Heard(msgspec.Struct, frozen=True, kw_only=True, tag="heard"):
    """What a worker has said."""

    number: int
    word: WorkerMessage


class Happened(msgspec.Struct, frozen=True, kw_only=True, tag="happened"):
    """What has happened to a worker."""

    record: AnyRecord


class Shown(msgspec.Struct, frozen=True, kw_only=True, tag="shown"):
    """What workers have written."""

    source: Source
    data: bytes


FrameDown = Task | Order | Say | End | Signal | Kill | Beat
FrameUp = Here | Unable | Heard | Happened | Shown | Beat


class Pipe:
    """Frames out of one descriptor and into another, without ever waiting."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming_descriptor, self._outgoing = incoming, outgoing
        for descriptor in (incoming, outgoing):
            os.set_blocking(descriptor, False)
        self._unhailed = bytearray()
        self._incoming = FrameDecoder(_FRAME_FORMAT, max_bytes=_MOST_BYTES)
        self._unsent = bytearray(_HAIL)
        self._is_hailed = False
        self.is_over = False
        """Whether the other side is gone."""

    def fileno(self) -> int:
        """What to select on."""
        return self._incoming_descriptor

    def send(self, frame: FrameDown | FrameUp) -> None:
        """Send a frame as soon as the other side takes it."""
        self._unsent += _FRAME_FORMAT.encode(msgspec.msgpack.encode(frame))
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent before."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._outgoing, self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self.is_over = True

    def receive(self, kind: Any) -> list[Any]:
        """The frames that have come, of this union of types."""
        self.flush()
        with suppress(BlockingIOError):
            while data := os.read(self._incoming_descriptor, 1 << 16):
                self._take(data)
            self.is_over = True
        frames = []
        try:
            for message in self._incoming.messages():
                frames.append(msgspec.msgpack.decode(message, type=kind))
        except FrameTooLongError:
            self.is_over = True
        return frames

    def _take(self, data: bytes) -> None:
        if self._is_hailed:
            self._incoming.feed(data)
            return
        self._unhailed += data
        _, hail, rest = self._unhailed.partition(_HAIL)
        if hail:
            self._is_hailed = True
            self._incoming.feed(bytes(rest))
