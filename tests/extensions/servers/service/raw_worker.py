"""A worker that speaks the protocol by hand, to say what the client never would."""

import msgspec
import zmq

from rankless.extensions.servers.service.wire.authentication import WorkerHello, prove
from rankless.extensions.servers.service.wire.messages import Kind, MessageHeader, decode_message, make_message

CHALLENGE = b"c" * 32


class RawWorker:
    """One connection to one server."""

    def __init__(self, address: str, *, worker: int = 0, worker_count: int = 1, **fields) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(address)
        fields = {"incarnation": 0, "instance": 7, "server_index": 0, "server_count": 1} | fields
        self.statement = msgspec.json.encode(WorkerHello(worker=worker, worker_count=worker_count, **fields))
        self.session = 0
        self.sequence = 0

    def close(self) -> None:
        self._context.destroy(0)

    def __enter__(self) -> "RawWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def receive(self, seconds: float = 20.0):
        """The next answer: its header and payload."""
        assert self.socket.poll(int(seconds * 1000)), "no answer"
        header, payload = decode_message([frame.buffer for frame in self.socket.recv_multipart(copy=False)])
        return header, [bytes(frame) for frame in payload]

    def is_silent(self, milliseconds: int = 0) -> bool:
        return not self.socket.poll(milliseconds)

    def send(self, header: MessageHeader, *payload) -> None:
        self.socket.send_multipart(make_message(header, payload))

    def challenge(self) -> bytes:
        self.send(MessageHeader(Kind.HELLO))
        header, (challenge,) = self.receive()
        assert header.kind == Kind.CHALLENGE
        return challenge

    def connect(self, token: str):
        """Prove the token, and return the answer."""
        proof = prove(token, "worker", self.challenge() + CHALLENGE, self.statement)
        self.send(MessageHeader(Kind.PROVE), self.statement, CHALLENGE, proof)
        header, payload = self.receive()
        self.session = header.session
        return header, payload

    def header(self, kind: int, **fields) -> MessageHeader:
        """The header of the next request."""
        return MessageHeader(kind, **{"session": self.session, "sequence": self.sequence + 1} | fields)

    def ask(self, kind: int, *payload, **fields):
        """Send the next request, and return its answer."""
        header = self.header(kind, **fields)
        self.send(header, *payload)
        answer, answer_payload = self.receive()
        if answer.kind in (Kind.DONE, Kind.FAILED):
            self.sequence += 1
        return answer, answer_payload

    def follow_sequence(self) -> None:
        """Learn which number the server expects next."""
        self.send(self.header(Kind.STATISTICS, sequence=2**50))
        header, _ = self.receive()
        assert header.kind == Kind.EXPECTED
        self.sequence = header.sequence - 1

    def barrier(self) -> None:
        """Return when the server has handled everything that was sent before."""
        self.challenge()
