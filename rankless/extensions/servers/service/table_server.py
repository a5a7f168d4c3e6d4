"""What a server does with each message: it does requests one after the other, and answers."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from rankless.errors import ServerError
from rankless.extensions.servers.config import ServerConfig
from rankless.extensions.servers.service.served_tables import ServerTables
from rankless.extensions.servers.service.server_status import RequestCounter
from rankless.extensions.servers.service.table_requests import (
    RequestAnswer,
    TableRequests,
    WorkerRequest,
    WorkerSession,
    failed,
)
from rankless.extensions.servers.service.wire.authentication import (
    Challenger,
    ServerWelcome,
    WorkerHello,
    draw_number,
    is_proof,
    prove,
)
from rankless.extensions.servers.service.wire.messages import (
    Kind,
    MessageHeader,
    MessageRefusedError,
    decode_json,
    decode_message,
    make_message,
)
from rankless.extensions.servers.tables.durable_tables import DurableTables

_PROOF_BYTES = 32
_LOG_SECONDS = 5.0
_MAY_END_WAITS = (Kind.PUSH, Kind.PUSH_SEVERAL, Kind.RESET, Kind.READY, Kind.LEAVE, Kind.REGROUP)
"""Requests that may complete a transaction, or make it impossible."""


SendMessage = Callable[[bytes, Sequence[bytes | memoryview]], bool]


class TableServer:
    """Serves tables to workers. Each connection has an identity that no other one can choose."""

    def __init__(
        self,
        config: ServerConfig,
        send: SendMessage,
        log: Callable[[str], None],
        durable: DurableTables | None = None,
    ) -> None:
        """Serve new tables, or durable ones.

        Args:
            config: The server's configuration.
            send: Sends frames to a connection. Returns whether it could.
            log: Writes a line into the server's log.
            durable: Tables that outlive the process.
        """
        self._config = config
        self._send_frames = send
        self._log = log
        self._challenger = Challenger()
        self._instance = draw_number()
        self._sessions: dict[int, WorkerSession] = {}
        """By worker."""
        self._by_identity: dict[bytes, WorkerSession] = {}
        self._waiting: list[WorkerRequest] = []
        self._last_logs: dict[str, float] = {}
        self._is_durable = durable is not None
        tables = ServerTables(config.index % config.server_count, config.server_count, durable)
        self.requests = TableRequests(tables, config.worker_count, config.mode, config.staleness)
        self.refused: Counter[str] = Counter()
        self.counter = RequestCounter()

    def take(self, identity: bytes, frames: Sequence[memoryview]) -> None:
        """Handle a message of the connection with an identity."""
        try:
            header, payload = decode_message(frames)
            if header.kind == Kind.HELLO:
                self._challenge(identity, header)
            elif header.kind == Kind.PROVE:
                self._welcome(identity, header, payload)
            else:
                self._handle(identity, header, payload)
        except MessageRefusedError as refusal:
            self._count(str(refusal))

    def end(self) -> None:
        """Answer requests that wait for other workers: this server ends."""
        error = ServerError(
            expected="a server that runs until the workers end",
            found=f"server {self._config.index} has received SIGTERM",
            fix="end the workers before the servers",
        )
        for request in self._waiting:
            self._reply(request.session, failed(request.header, error))
        self._waiting.clear()

    def _challenge(self, identity: bytes, header: MessageHeader) -> None:
        challenge = self._challenger.challenge(identity)
        self._send(identity, MessageHeader(Kind.CHALLENGE, sequence=header.sequence), (challenge,))

    def _welcome(self, identity: bytes, header: MessageHeader, payload: Sequence[memoryview]) -> None:
        """Make a session for a worker that knows the token."""
        if [frame.nbytes for frame in payload[1:]] != [_PROOF_BYTES, _PROOF_BYTES]:
            raise MessageRefusedError("a proof of the wrong size")
        statement, client_challenge, proof = (bytes(frame) for frame in payload)
        challenges = self._challenger.challenge(identity) + client_challenge
        if not is_proof(proof, self._config.token, "worker", challenges, statement):
            self._send(identity, MessageHeader(Kind.REFUSED), (b"another token than this run's",))
            raise MessageRefusedError("another token than this run's")
        try:
            session = self._make_session(identity, decode_json(statement, WorkerHello))
        except ServerError as error:
            answer = failed(header, error)
            self._send(identity, answer.header, answer.payload)
            raise MessageRefusedError("a worker of another run, or one worker twice") from None
        transactions = self.requests.transactions
        welcome = ServerWelcome(
            instance=self._instance,
            last_sequence=session.last_sequence,
            ready=transactions.ready[session.worker],
            committed=transactions.committed_of(session.worker),
            durable=self._is_durable,
        )
        text = msgspec.json.encode(welcome)
        server_proof = prove(self._config.token, "server", challenges, text + session.number.to_bytes(8, "little"))
        self._send(identity, MessageHeader(Kind.WELCOME, session=session.number), (text, server_proof))

    def _make_session(self, identity: bytes, hello: WorkerHello) -> WorkerSession:
        config = self._config
        run = (config.worker_count, config.index, config.server_count)
        wanted = (hello.worker_count, hello.server_index, hello.server_count)
        if run != wanted:
            raise ServerError(
                expected="a worker of {} that wants server {} of {}".format(*run),
                found="a worker of {} that wants server {} of {}".format(*wanted),
                fix="give all workers the same addresses, in the order of the servers",
            )
        if not 0 <= hello.worker < config.worker_count:
            raise ServerError(
                expected=f"a worker from 0 to {config.worker_count - 1}",
                found=hello.worker,
                fix="give each worker its own number",
            )
        self._require_not_lost(hello.worker)
        session = self._sessions.get(hello.worker)
        known = (-1, 0) if session is None else (session.incarnation, session.instance)
        number = draw_number()
        if session is not None and known == (hello.incarnation, hello.instance):
            if session.identity == identity:  # a greeting that was sent again
                return session
            del self._by_identity[session.identity]
            session.reconnect(number, identity)
            self._by_identity[identity] = session
            return session
        if hello.incarnation <= known[0]:
            raise ServerError(
                expected=f"one connection of worker {hello.worker}, or an incarnation after {known[0]}",
                found=f"another connection with incarnation {hello.incarnation}",
                fix="give each worker its own number, and count incarnations upwards when a worker starts again",
            )
        session = WorkerSession(
            worker=hello.worker,
            incarnation=hello.incarnation,
            instance=hello.instance,
            number=number,
            identity=identity,
        )
        if hello.worker in self._sessions:
            self._by_identity.pop(self._sessions[hello.worker].identity, None)
        self._sessions[hello.worker] = session
        self._by_identity[identity] = session
        self._waiting = [request for request in self._waiting if request.session.worker != hello.worker]
        self.requests.begin_incarnation(hello.worker)
        self._commit()
        return session

    def _require_not_lost(self, worker: int) -> None:
        if worker in self.requests.transactions.lost:
            raise ServerError(
                expected="a worker that the others have not lost",
                found=f"worker {worker}, without which they continue",
                fix="start the run again",
            )

    def _handle(self, identity: bytes, header: MessageHeader, payload: Sequence[memoryview]) -> None:
        """Do a request of a session, or answer an earlier one again."""
        session = self._by_identity.get(identity)
        if session is None or session.number != header.session:
            self._count("a request without a session")
            self._send(identity, MessageHeader(Kind.NO_SESSION, sequence=header.sequence))
            return
        try:
            if session.is_next(header):
                self._do_next(WorkerRequest(session, header, payload))
            elif header.sequence > session.last_sequence:
                self._count("a request before its predecessor")
                self._send(identity, MessageHeader(Kind.EXPECTED, sequence=session.last_sequence + 1))
            elif header.sequence in session.answers:
                self._count("a request once more")
                self._reply(session, session.answers[header.sequence])
            elif session.is_answered_later(header.sequence):
                self._count("a request once more")
            else:
                raise MessageRefusedError("a request whose answer was acknowledged")
        except MessageRefusedError as refusal:
            refused = MessageHeader(Kind.REFUSED, sequence=header.sequence)
            self._send(identity, refused, (str(refusal).encode(),))
            raise

    def _do_next(self, request: WorkerRequest) -> None:
        """Do the next request of a session. One that is refused does not count as done."""
        self.requests.check(request)
        if self.requests.must_wait(request):
            request.session.last_sequence = request.header.sequence
            self._waiting.append(request)
            return
        answer = self.requests.answer(request)
        request.session.last_sequence = request.header.sequence
        self._log_opened(request, answer)
        self._finish(request, answer)
        if request.header.kind == Kind.REGROUP and answer.header.kind == Kind.DONE:
            self._close_lost_sessions()
        if request.header.kind in _MAY_END_WAITS:
            self._commit()
        if request.header.kind == Kind.LEAVE:  # nobody waits for the worker any more
            self._do_waiting()

    def _close_lost_sessions(self) -> None:
        """Refuse what lost workers have still sent."""
        for worker in self.requests.transactions.lost.keys() & self._sessions.keys():
            session = self._sessions.pop(worker)
            self._by_identity.pop(session.identity, None)
            self._waiting = [request for request in self._waiting if request.session is not session]
            self._log(f"worker {worker} is lost")

    def _commit(self) -> None:
        """Commit all transactions that are complete, and do the requests that have waited for them."""
        while self.requests.commit():
            self._do_waiting()
        if self.requests.failure is not None:
            self._do_waiting()

    def _do_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            if self.requests.must_wait(request):
                self._waiting.append(request)
                continue
            try:
                answer = self.requests.answer(request)
            except MessageRefusedError as refusal:
                self._count(str(refusal))
                refused = MessageHeader(Kind.REFUSED, sequence=request.header.sequence)
                answer = RequestAnswer(refused, (str(refusal).encode(),))
            self._finish(request, answer)

    def _finish(self, request: WorkerRequest, answer: RequestAnswer) -> None:
        request.session.answers[request.header.sequence] = answer
        self.counter.count(request.header, request.payload, answer.header, self.requests.tables)
        self._reply(request.session, answer)

    def _reply(self, session: WorkerSession, answer: RequestAnswer) -> None:
        committed = self.requests.transactions.committed_of(session.worker)
        header = answer.header._replace(session=session.number, transaction=committed)
        self._send(session.identity, header, answer.payload)

    def _send(self, identity: bytes, header: MessageHeader, payload: Sequence[object] = ()) -> None:
        """Send an answer. Nobody waits for one that cannot be sent: its connection is gone, or reads nothing."""
        if not self._send_frames(identity, make_message(header, payload)):
            self._count("an answer that could not be sent")

    def _count(self, reason: str) -> None:
        self.refused[reason] += 1
        now = time.monotonic()
        if now - self._last_logs.get(reason, -_LOG_SECONDS) >= _LOG_SECONDS:
            self._last_logs[reason] = now
            self._log(f"refused: {reason} ({self.refused[reason]} so far)")

    def _log_opened(self, request: WorkerRequest, answer: RequestAnswer) -> None:
        if request.header.kind == Kind.OPEN and answer.header.kind == Kind.DONE:
            opened = self.requests.tables.find(answer.header.table)
            if opened.worker == request.session.worker:
                self._log(f"table {opened.name!r}: {opened.table.settings}")


def log_line(index: int, text: str) -> None:
    """Write a line to the standard error output."""
    print(f"server {index}: {text}", file=sys.stderr, flush=True)
