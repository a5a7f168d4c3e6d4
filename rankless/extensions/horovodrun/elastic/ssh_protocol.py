"""The messages between the driver of an elastic job and the agent of another host, over the pipes of one ssh process.

ssh has authenticated both sides, and encrypts. The receiver skips everything before a start marker, because a login
shell may print text first.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from rankless.config.run_config import AgreedJobConfig, Program, RunRequest
from rankless.launch.rendezvous.messages import (
    Heartbeat,
    SendToWorker,
    WorkerMessageReceived,
    WorkerOutput,
    WorkerRecords,
)
from rankless.records.encoding import encode_msgpack
from rankless.records.framing import FrameDecoder, FrameFormat, FrameTooLongError

HEARTBEAT_SECONDS = 1.0
HEARTBEAT_TIMEOUT_SECONDS = 8.0
"""A side that sends nothing for so long counts as lost."""
_START_MARKER = b"\0rankless elastic 2\0"
_FRAME_FORMAT = FrameFormat(">I")
_MAX_FRAME_BYTES = 16 << 20
_READ_BYTES = 1 << 16


class HostTask(msgspec.Struct, frozen=True, kw_only=True, tag="host_task"):
    """What the host runs. The driver sends it first."""

    program: Program
    request: RunRequest
    start: AgreedJobConfig
    folder: str
    """The folder for log files."""
    environment: dict[str, str]
    store_token: str
    """What the store of the rounds asks for."""


class StartWorker(msgspec.Struct, frozen=True, kw_only=True, tag="start_worker"):
    """Start a worker."""

    number: int
    host: str
    slot: int


class KillIfStalled(msgspec.Struct, frozen=True, kw_only=True, tag="kill_if_stalled"):
    """Kill one worker as soon as it makes no progress. A worker that computes is left alone."""

    number: int
    reason: str


class SignalWorkers(msgspec.Struct, frozen=True, kw_only=True, tag="signal_workers"):
    """Send a signal to all workers, which ends them."""

    signal: int


class KillWorkers(msgspec.Struct, frozen=True, kw_only=True, tag="kill_workers"):
    """Kill all workers."""


class AgentReady(msgspec.Struct, frozen=True, kw_only=True, tag="agent_ready"):
    """The agent runs."""

    address: str
    """The address by which the driver's host reaches the agent's."""
    interface: str
    """The network interface of that address."""
    driver_address: str
    versions: Mapping[str, str]
    """Of Python, torch, NCCL and Rankless."""


class AgentFailed(msgspec.Struct, frozen=True, kw_only=True, tag="agent_failed"):
    """The host cannot take part."""

    reason: str


AgentCommand = HostTask | StartWorker | SendToWorker | KillIfStalled | SignalWorkers | KillWorkers | Heartbeat
"""From the driver to an agent."""
AgentEvent = AgentReady | AgentFailed | WorkerMessageReceived | WorkerRecords | WorkerOutput | Heartbeat
"""From an agent to the driver."""


class PipeConnection:
    """Sends and receives messages over two pipes, without blocking."""

    def __init__(self, read_descriptor: int, write_descriptor: int) -> None:
        self._read_descriptor, self._write_descriptor = read_descriptor, write_descriptor
        for descriptor in (read_descriptor, write_descriptor):
            os.set_blocking(descriptor, False)
        self._before_marker = bytearray()
        self._has_found_marker = False
        self._incoming = FrameDecoder(_FRAME_FORMAT, max_bytes=_MAX_FRAME_BYTES)
        self._outgoing = bytearray(_START_MARKER)
        self.is_closed = False
        """Whether the other side is gone."""

    def fileno(self) -> int:
        """Return the descriptor for a selector."""
        return self._read_descriptor

    def send(self, message: AgentCommand | AgentEvent) -> None:
        """Send a message as soon as the other side takes it."""
        self._outgoing += _FRAME_FORMAT.encode(encode_msgpack(message))
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent before."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._write_descriptor, self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self.is_closed = True

    def receive(self, message_type: Any) -> list[Any]:
        """Return the messages that have arrived, decoded as this union of types."""
        self.flush()
        with suppress(BlockingIOError):
            while data := os.read(self._read_descriptor, _READ_BYTES):
                self._feed(data)
            self.is_closed = True
        messages = []
        try:
            for frame in self._incoming.messages():
                messages.append(msgspec.msgpack.decode(frame, type=message_type))
        except FrameTooLongError:
            self.is_closed = True
        return messages

    def _feed(self, data: bytes) -> None:
        if self._has_found_marker:
            self._incoming.feed(data)
            return
        self._before_marker += data
        _, marker, rest = self._before_marker.partition(_START_MARKER)
        if marker:
            self._has_found_marker = True
            self._incoming.feed(bytes(rest))
