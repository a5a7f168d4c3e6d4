"""A worker's connection to one server: numbered requests, and their answers."""

import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from rankless.config.servers import ServersConfig
from rankless.errors import RanklessError, ServerError
from rankless.parameter_server.servers.authentication import (
    PROOF_BYTES,
    ServerWelcome,
    WorkerHello,
    is_proof,
    prove,
)
from rankless.parameter_server.servers.error_messages import decode_error
from rankless.parameter_server.servers.messages import (
    COPIED_BYTES,
    MOST_IN_FLIGHT,
    MOST_MESSAGE_BYTES,
    Frame,
    Kind,
    MessageHeader,
    MessageRefusedError,
    decode_json,
    decode_message,
    make_message,
)

_HELLO_SECONDS = 1.0
"""After which a greeting is sent again, because its connection may have broken."""


class ServerAnswer(NamedTuple):
    """The answer to a request that has been done."""

    header: MessageHeader
    payload: list[memoryview]


class ServerConnection:
    """Numbered requests to one server, and their answers. Not for several threads."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", config: ServersConfig, hello: WorkerHello) -> None:
        """Begin to connect. `ready` tells whether it is done."""
        self.index = hello.server_index
        self.address = config.addresses[self.index]
        self.name = f"server {self.index} at {self.address}"
        self.socket = context.socket(zmq.DEALER)
        self.welcome: ServerWelcome | None = None
        self._hello, self._token = hello, config.token
        self._statement = msgspec.json.encode(hello)
        self._challenge, self._server_challenge = secrets.token_bytes(PROOF_BYTES), b""
        self._session = 0
        self._sequence = 0
        self._acknowledged = 0
        self._sent: dict[int, list[bytes | memoryview]] = {}
        """The frames of requests without an answer."""
        self._answers: dict[int, ServerAnswer | RanklessError] = {}
        self._next_hello = 0.0
        self._monitor = self._connect()

    def close(self) -> None:
        """Close the connection. Messages that have not been sent are dropped."""
        self.socket.disable_monitor()
        self.socket.close(0)

    def greet(self) -> None:
        """Ask for a challenge, if none has arrived for a while. It is sent when the server listens."""
        if self.welcome is None and time.monotonic() >= self._next_hello:
            self._next_hello = time.monotonic() + _HELLO_SECONDS
            self._send(make_message(MessageHeader(Kind.HELLO), ()))

    def send(self, header: MessageHeader, payload: Sequence[Frame] = ()) -> int:
        """Send a request, and return its number. The payload must not change before its answer has arrived."""
        self._sequence += 1
        header = header._replace(session=self._session, sequence=self._sequence, acknowledged=self._acknowledged)
        self._sent[self._sequence] = make_message(header, payload)
        self._send(self._sent[self._sequence])
        return self._sequence

    @property
    def is_full(self) -> bool:
        """Whether an answer must arrive before another request."""
        return self._sequence - self._acknowledged >= MOST_IN_FLIGHT

    @property
    def unanswered(self) -> list[int]:
        """The numbers of requests without an answer."""
        return list(self._sent)

    def has_answer(self, sequence: int) -> bool:
        """Return whether the answer to a request has arrived."""
        return sequence in self._answers

    def take_answer(self, sequence: int) -> ServerAnswer:
        """Return an answer that has arrived. Raises the error that it carries."""
        answer = self._answers.pop(sequence)
        if isinstance(answer, RanklessError):
            raise answer
        return answer

    def receive(self) -> None:
        """Take all messages that are there. Raises ServerError for a server that does not belong to this run."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            try:
                self._take(*decode_message([frame.buffer for frame in frames]))
            except MessageRefusedError as refusal:
                raise self._error(f"an answer that is not understood: {refusal}") from None

    def check_alive(self) -> None:
        """Raise ServerError if the connection has broken."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            if self.welcome is not None:
                self.receive()
                raise self._error("the connection has broken: the server has ended, or cannot be reached any more")

    def _connect(self) -> "zmq.Socket[bytes]":
        self.socket.set(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RECONNECT_IVL, 20)
        self.socket.set(zmq.RECONNECT_IVL_MAX, 500)
        self.socket.set(zmq.HEARTBEAT_IVL, 5000)
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, 15000)
        self.socket.set(zmq.IPV6, int("[" in self.address))
        self.socket.copy_threshold = COPIED_BYTES
        monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self.socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise ServerError(
                expected=f"an address to which server {self.index} can listen",
                found=f"{self.address}: {error.strerror}",
                fix="give servers addresses as ipc:///path or tcp://host:port",
            ) from None
        return monitor

    def _send(self, frames: Sequence[bytes | memoryview]) -> None:
        try:
            self.socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
        except zmq.Again:  # only greetings to a server that does not listen are that many
            return

    def _take(self, header: MessageHeader, payload: list[memoryview]) -> None:
        match header.kind:
            case Kind.CHALLENGE:
                self._prove(payload)
            case Kind.WELCOME:
                self._accept(header, payload)
            case Kind.EXPECTED:
                for sequence in sorted(self._sent):
                    if sequence >= header.sequence:
                        self._send(self._sent[sequence])
            case Kind.DONE:
                self._note(header.sequence, ServerAnswer(header, payload))
            case Kind.FAILED if self.welcome is None:
                raise decode_error(_first(payload), self.name)
            case Kind.FAILED:
                self._note(header.sequence, decode_error(_first(payload), self.name))
            case Kind.REFUSED if header.sequence in self._sent or self.welcome is None:
                raise self._error(f"it refuses {str(_first(payload), 'utf-8', 'replace')}")

    def _note(self, sequence: int, answer: ServerAnswer | RanklessError) -> None:
        """Keep an answer. All before it may be forgotten by the server once they have arrived, too."""
        if self._sent.pop(sequence, None) is not None:
            self._answers[sequence] = answer
            self._acknowledged = min(self._sent, default=self._sequence + 1) - 1

    def _prove(self, payload: list[memoryview]) -> None:
        if self.welcome is None and len(payload) == 1:
            self._server_challenge = bytes(payload[0])
            challenges = self._server_challenge + self._challenge
            proof = prove(self._token, "worker", challenges, self._statement)
            self._send(make_message(MessageHeader(Kind.PROVE), (self._statement, self._challenge, proof)))

    def _accept(self, header: MessageHeader, payload: list[memoryview]) -> None:
        """Begin the session, if the server knows the token, too."""
        if self.welcome is not None or len(payload) != 2:
            return
        text, proof = (bytes(frame) for frame in payload)
        statement = text + header.session.to_bytes(8, "little")
        if not is_proof(proof, self._token, "server", self._server_challenge + self._challenge, statement):
            raise self._error("it does not know the token of this run")
        self.welcome = decode_json(text, ServerWelcome)
        self._session = header.session

    def _error(self, found: str) -> ServerError:
        return ServerError(
            expected=f"{self.name} to answer worker {self._hello.worker}",
            found=found,
            fix="look at the server's log, and start the run again",
        )


def _first(payload: list[memoryview]) -> memoryview:
    return payload[0] if payload else memoryview(b"")
