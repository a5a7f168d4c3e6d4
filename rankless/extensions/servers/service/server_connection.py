"""A worker's connection to one server: numbered requests, and their answers."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from rankless.errors import RanklessError, ServerError
from rankless.extensions.servers.config import ServersConfig
from rankless.extensions.servers.service.sent_requests import TRANSFERS, SentRequest, SentRequests
from rankless.extensions.servers.service.wire.authentication import (
    PROOF_BYTES,
    ServerWelcome,
    WorkerHello,
    is_proof,
    prove,
)
from rankless.extensions.servers.service.wire.messages import (
    Frame,
    Kind,
    MessageHeader,
    MessageRefusedError,
    decode_error,
    decode_json,
    decode_message,
    make_message,
)
from rankless.extensions.servers.service.wire.worker_sockets import WorkerSocket, WorkerSockets

_HELLO_SECONDS = 1.0
"""After which a greeting is sent again, because its connection may have broken."""


class TransferLostError(ServerError):
    """Raised if a server has started again while a worker read or restored contents: it must begin anew."""


class ReadInterruptedError(Exception):
    """Raised within a read that waits for the step of a lost worker."""


def require_no_interruption() -> None:
    """Raise the error again: nothing can be done about it here."""
    raise


def is_never_interrupted() -> bool:
    """Return False: no worker can be lost."""
    return False


def is_never_lost(server: int) -> bool:  # noqa: ARG001  # the signature of `ConnectionSettings.is_lost`
    """Return False: no agent says that servers are lost."""
    return False


WaitCallback = Callable[[float, int], None]
"""Called while a worker waits, with the seconds so far and the index of the server."""


class ConnectionSettings(NamedTuple):
    """For what a worker waits, what happens meanwhile, and if a connection breaks.

    Args:
        reconnect_seconds: How long a server may be away. 0: its end is an error at once.
        notify: Tells the user that a worker waits for a server, and that it continues.
        on_wait: Called several times a second while the worker waits. It may raise.
        is_interrupted: Called several times a second within reads: whether a worker is lost, whose step they may await.
        recover: Called then, in the handler of the error. It continues without that worker, or raises.
        is_lost: Whether a server is lost for good, by its index, so that its copy continues alone.
        defers: Whether changes return before servers have answered them. The next commit awaits the answers.
        open_sockets: Makes the sockets to the servers.
    """

    reconnect_seconds: float = 0.0
    notify: Callable[[str], None] | None = None
    on_wait: WaitCallback | None = None
    is_interrupted: Callable[[], bool] = is_never_interrupted
    recover: Callable[[], None] = require_no_interruption
    is_lost: Callable[[int], bool] = is_never_lost
    defers: bool = False
    open_sockets: Callable[[ServersConfig], WorkerSockets] = WorkerSockets


class ServerAnswer(NamedTuple):
    """The answer to a request that has been done."""

    header: MessageHeader
    payload: list[memoryview]


class ServerConnection:
    """Numbered requests to one server, and their answers. Not for several threads."""

    def __init__(
        self,
        sockets: WorkerSockets,
        config: ServersConfig,
        hello: WorkerHello,
        settings: ConnectionSettings,
    ) -> None:
        """Begin to connect. `welcome` tells whether it is done."""
        self.index = hello.server_index
        self.address = config.addresses[self.index]
        self.name = f"server {self.index} at {self.address}"
        self.welcome: ServerWelcome | None = None
        self._sockets, self._settings = sockets, settings
        self._hello, self._token = hello, config.token
        self._statement = msgspec.json.encode(hello)
        self._challenge, self._server_challenge = b"", b""
        self._session = 0
        self._sent = SentRequests()
        self._unanswered: set[int] = set()
        """Numbers of requests whose answers somebody waits for."""
        self._answers: dict[int, ServerAnswer | RanklessError] = {}
        self._next_hello = 0.0
        self._last_welcome: ServerWelcome | None = None
        self._lost_at = 0.0
        self._is_broken = self._has_left = False
        self._connect()

    @property
    def worker(self) -> int:
        """The number of the worker."""
        return self._hello.worker

    @property
    def welcomes(self) -> list[ServerWelcome]:
        """The server's answer to the greeting, if it has arrived."""
        return [] if self.welcome is None else [self.welcome]

    @property
    def sockets(self) -> list[WorkerSocket]:
        """The socket on which messages arrive."""
        return [self._socket]

    @property
    def is_waiting(self) -> bool:
        """Whether the connection has broken, and there is no new one yet."""
        return self._last_welcome is not None and self.welcome is None

    def close(self) -> None:
        """Close the connection. Messages that have not been sent are dropped."""
        self._socket.close()

    def greet(self) -> None:
        """Ask for a challenge, if none has arrived for a while. It is sent when the server listens."""
        if self.welcome is None and time.monotonic() >= self._next_hello:
            self._next_hello = time.monotonic() + _HELLO_SECONDS
            self._socket.send(make_message(MessageHeader(Kind.HELLO), ()))

    def send(self, header: MessageHeader, payload: Sequence[Frame] = ()) -> int:
        """Send a request, and return its number.

        The payload must not change before its answer has arrived, that of a change not before it is committed.
        """
        number = self._sent.add(header, payload)
        self._unanswered.add(number)
        self._send_queued()
        return number

    def abandon(self, number: int) -> None:
        """Wait no more for the answer to a request that reads."""
        self._unanswered.discard(number)
        self._answers.pop(number, None)

    def forget_after(self, transaction: int) -> None:
        """Send changes of later transactions to no later process of the server."""
        self._sent.forget_after(transaction)

    @property
    def committed(self) -> int:
        """The last transaction that the server is known to have committed."""
        return self._sent.committed

    @property
    def in_flight(self) -> int:
        """How many of the requests that may be without an answer are taken."""
        return self._sent.in_flight

    @property
    def is_full(self) -> bool:
        """Whether an answer must arrive before another request."""
        return self._sent.is_full

    def has_answer(self, number: int) -> bool:
        """Return whether the answer to a request has arrived."""
        return number in self._answers

    def take_answer(self, number: int) -> ServerAnswer:
        """Return an answer that has arrived. Raises the error that it carries."""
        answer = self._answers.pop(number)
        if isinstance(answer, RanklessError):
            raise answer
        return answer

    def receive(self) -> None:
        """Take all messages that are there. Raises ServerError for a server that does not belong to this run."""
        while (frames := self._socket.receive()) is not None:
            try:
                self._take(*decode_message(frames))
            except MessageRefusedError as refusal:
                raise self._error(f"an answer that is not understood: {refusal}") from None

    def check_alive(self) -> None:
        """Notice that the connection has broken, and begin to reconnect. Raises ServerError if it takes too long."""
        if self._has_left:  # a greeting would make the server's next process wait for this worker again
            return
        if self._socket.has_broken():
            self._is_broken = True
            self.receive()
            if self.welcome is not None:
                self._reconnect()
        if self.is_waiting:
            self.greet()
            if time.monotonic() - self._lost_at > self._settings.reconnect_seconds:
                raise self._error("the connection has broken: the server has ended, or cannot be reached any more")

    def _reconnect(self) -> None:
        """Begin a new connection. The old one's messages, which have its session, are dropped."""
        if self._settings.reconnect_seconds == 0:
            raise self._error("the connection has broken: the server has ended, or cannot be reached any more")
        self._lost_at = time.monotonic()
        self._notify(f"worker {self._hello.worker} waits for {self.name}: the connection has broken")
        self._last_welcome, self.welcome, self._is_broken = self.welcome, None, True
        self._next_hello = 0.0
        self.close()
        self._connect()
        self.greet()

    def _connect(self) -> None:
        self._challenge = secrets.token_bytes(PROOF_BYTES)
        self._socket = self._sockets.open(self.index)

    def _send_queued(self) -> None:
        """Send requests, as many as may be in flight."""
        while self.welcome is not None and (following := self._sent.take_next()) is not None:
            sequence, acknowledged, request = following
            self._transmit(sequence, acknowledged, request)

    def _transmit(self, sequence: int, acknowledged: int, request: SentRequest) -> None:
        header = request.header._replace(session=self._session, sequence=sequence, acknowledged=acknowledged)
        self._socket.send(make_message(header, request.payload))

    def _send_again(self, first_sequence: int) -> None:
        """Send requests of this session that have no answer once more, from one on."""
        in_flight = list(self._sent.list_in_flight(first_sequence))
        for sequence, request in in_flight:
            self._transmit(sequence, self._sent.acknowledged, request)

    def _take(self, header: MessageHeader, payload: list[memoryview]) -> None:
        match header.kind:
            case Kind.CHALLENGE:
                self._prove(payload)
            case Kind.WELCOME:
                self._accept(header, payload)
            case Kind.EXPECTED:
                self._send_again(header.sequence)
            case Kind.DONE:
                self._sent.note_committed(header.transaction)
                self._note(header.sequence, ServerAnswer(header, payload))
            case Kind.FAILED if self.welcome is None:
                raise decode_error(_first(payload), self.name)
            case Kind.FAILED:
                self._note(header.sequence, decode_error(_first(payload), self.name))
            case Kind.NO_SESSION if self.welcome is not None:
                self._reconnect()  # the socket has connected again by itself, before `check_alive` was called
            case Kind.REFUSED if self.welcome is None and self._has_broken():
                return  # the challenge was that of a process that has died meanwhile: another greeting follows
            case Kind.REFUSED if self.welcome is None:
                raise self._error(f"it refuses {str(_first(payload), 'utf-8', 'replace')}")
            case Kind.REFUSED:
                self._refuse(header.sequence, str(_first(payload), "utf-8", "replace"))

    def _has_broken(self) -> bool:
        """Return whether the connection has broken since there was a session, or before the first one."""
        self._is_broken |= self._socket.has_broken()
        return self._is_broken

    def _refuse(self, sequence: int, reason: str) -> None:
        """Raise ServerError for a refused request, or let a transfer begin anew of which the server knows nothing."""
        refused = self._sent.find(sequence)
        if refused is None:
            return
        has_restarted = self._last_welcome is not None and refused.header.kind in TRANSFERS
        if not has_restarted or self._sent.abandon(sequence) is None:
            raise self._error(f"it refuses {reason}")
        self._note_number(refused.number, self._transfer_lost())

    def _note(self, sequence: int, answer: ServerAnswer | RanklessError) -> None:
        """Keep an answer. All before it may be forgotten by the server once they have arrived, too."""
        request = self._sent.finish(sequence)
        if request is not None:
            self._has_left |= request.header.kind == Kind.LEAVE and isinstance(answer, ServerAnswer)
            self._note_number(request.number, answer)
            self._send_queued()

    def _note_number(self, number: int, answer: ServerAnswer | RanklessError) -> None:
        if number in self._unanswered:
            self._unanswered.discard(number)
            self._answers[number] = answer

    def _prove(self, payload: list[memoryview]) -> None:
        if self.welcome is None and len(payload) == 1:
            self._server_challenge = bytes(payload[0])
            challenges = self._server_challenge + self._challenge
            proof = prove(self._token, "worker", challenges, self._statement)
            self._socket.send(make_message(MessageHeader(Kind.PROVE), (self._statement, self._challenge, proof)))

    def _accept(self, header: MessageHeader, payload: list[memoryview]) -> None:
        """Begin the session, if the server knows the token, too."""
        if self.welcome is not None or len(payload) != 2:
            return
        text, proof = (bytes(frame) for frame in payload)
        statement = text + header.session.to_bytes(8, "little")
        if not is_proof(proof, self._token, "server", self._server_challenge + self._challenge, statement):
            raise self._error("it does not know the token of this run")
        welcome = decode_json(text, ServerWelcome)
        if self._last_welcome is not None:
            self._go_on(self._last_welcome, welcome, header.session)
        self.welcome, self._session, self._is_broken = welcome, header.session, False
        self._send_queued()

    def _go_on(self, before: ServerWelcome, welcome: ServerWelcome, session: int) -> None:
        """Send what a server lacks, after a broken connection."""
        self._session = session
        if welcome.instance == before.instance:
            self._send_again(0)
            how = "answers again"
        else:
            if not welcome.durable or welcome.committed < self._sent.committed:
                raise self._error("it has started again, and has lost its tables")
            done, interrupted = self._sent.restart(welcome.committed)
            for number in done:
                self._note_number(number, ServerAnswer(MessageHeader(Kind.DONE), []))
            for number in interrupted:
                self._note_number(number, self._transfer_lost())
            how = "has started again"
        seconds = time.monotonic() - self._lost_at
        self._notify(f"worker {self._hello.worker} continues after {seconds:.1f} s: {self.name} {how}")

    def _transfer_lost(self) -> TransferLostError:
        return TransferLostError(
            expected=f"{self.name} to run while its contents are read or restored",
            found="it has started again",
            fix="read or restore them again",
        )

    def _notify(self, text: str) -> None:
        if self._settings.notify is not None:
            self._settings.notify(text)

    def _error(self, found: str) -> ServerError:
        return ServerError(
            expected=f"{self.name} to answer worker {self._hello.worker}",
            found=found,
            fix="look at the server's log, and start the run again",
        )


def _first(payload: list[memoryview]) -> memoryview:
    return payload[0] if payload else memoryview(b"")
