"""The store of a run: a server that PyTorch's `TCPStore` connects to, and that asks for the run's token.

Note [the run's store]: torch's own server accepts every connection. Any local user, and on several hosts anyone in the
network, could read, change and delete the keys of a run. This server speaks the same protocol, and serves a connection
only once its client has shown that it knows the token (Note [store access]). So the clients are PyTorch's own, in C++,
and work with every backend; `connect_to_run_store` opens them. The server runs in the agent of host 0, where no script
can hold the interpreter. It imports no torch.

Note [queries of a store]: a frame is the number of a query and its fields
(`torch/csrc/distributed/c10d/TCPStoreBackend.hpp`). A text or a value is its length in 8 bytes, then its bytes. Numbers
have the byte order of the machine. A newer PyTorch adds queries at the end of the list.

Note [rounds of a store]: each round of an elastic job has values of its own. Once a round has ended, the server closes
the connections of its clients. A rank that waits for a key then fails at once, even if the worker that was to write the
key was killed.
"""

import contextlib
import enum
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rankless.records.store_authentication import (
    CHALLENGE_KEY,
    PROOF_KEY,
    REFUSED,
    ROUND_ENDED,
    StoreProof,
    is_proof_right,
    key_prefix,
    make_nonce,
    prove_to_client,
)
from rankless.records.unauthenticated_client_limits import NewClients

MAGIC_NUMBER = 0x3C85F7CE
"""With it each client begins."""
MAX_TEXT_BYTES = 8 << 20
"""The longest key or value: as long as torch's server accepts."""
MAX_KEYS = 128 << 10
_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"
_LENGTH, _SIGNED, SHORT = struct.Struct("=Q"), struct.Struct("=q"), struct.Struct("=I")


class QueryType(enum.IntEnum):
    """The queries, with torch's names and numbers."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


class IncompleteQuery(Exception):
    """The rest of a query has not arrived."""


class InvalidQuery(Exception):
    """A client breaks the protocol."""


class Query:
    """Reads the fields of a query from what has arrived. Its methods raise `IncompleteQuery`."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self.position = 0
        """How many bytes have been read."""

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        end = self.position + size
        if end > len(self._data):
            raise IncompleteQuery
        found = bytes(self._data[self.position : end])
        self.position = end
        return found

    def read_number(self, format: struct.Struct) -> int:
        """Return the next number."""
        number: int = format.unpack(self.read(format.size))[0]
        return number

    def read_text(self) -> bytes:
        """Return the next key or value. Raises `InvalidQuery` if it is too long."""
        length = self.read_number(_LENGTH)
        if length > MAX_TEXT_BYTES:
            raise InvalidQuery
        return self.read(length)

    def read_texts(self) -> list[bytes]:
        """Return the next list of keys. Raises `InvalidQuery` if it is too long."""
        return [self.read_text() for _ in range(self._read_count())]

    def read_items(self) -> dict[bytes, bytes]:
        """Return the next list of keys and values. Raises `InvalidQuery` if it is too long."""
        return {self.read_text(): self.read_text() for _ in range(self._read_count())}

    def read_first_key(self, kind: int) -> bytes:
        """Return the first key of a query. Raises `InvalidQuery` if queries of this kind have no keys."""
        if kind in (QueryType.CHECK, QueryType.WAIT, QueryType.MULTI_GET, QueryType.MULTI_SET):
            self._read_count()
        elif kind in (QueryType.GETNUMKEYS, QueryType.CANCEL_WAIT, QueryType.LIST_KEYS):
            raise InvalidQuery
        return self.read_text()

    def _read_count(self) -> int:
        count = self.read_number(_LENGTH)
        if count > MAX_KEYS:
            raise InvalidQuery
        return count


def pack_text(text: bytes) -> bytes:
    """Return a text as a field of an answer."""
    return _LENGTH.pack(len(text)) + text


class StoreClient:
    """The connection of a client, which may wait for keys."""

    def __init__(self, connection: socket.socket, send: Callable[["StoreClient"], None]) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.challenge = make_nonce()
        self.values: StoreValues | None = None
        """The values of its round; None until it has shown that it knows the token."""
        self.awaited: set[bytes] = set()
        """The keys that it still waits for."""
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.is_valid = False
        """Whether it has sent torch's number."""
        self.waits_for_write = False
        self._send = send

    def send(self, data: bytes) -> None:
        """Send an answer."""
        if data:
            self.outgoing += data
            self._send(self)


class StoreValues:
    """The keys and queues of a store, and the clients that wait for them."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, list[StoreClient]] = {}
        self._answers: Mapping[QueryType, Callable[[Query, StoreClient], bytes]] = {
            QueryType.SET: lambda query, _: self._set({query.read_text(): query.read_text()}),
            QueryType.COMPARE_SET: self._compare_and_set,
            QueryType.GET: lambda query, _: pack_text(self._by_key.get(query.read_text(), b"")),
            QueryType.ADD: lambda query, _: _SIGNED.pack(self._add(query.read_text(), query.read_number(_SIGNED))),
            QueryType.CHECK: lambda query, _: _READY if self._has_all(query.read_texts()) else _NOT_READY,
            QueryType.WAIT: self._wait,
            QueryType.GETNUMKEYS: lambda _query, _: _SIGNED.pack(len(self._by_key)),
            QueryType.DELETE_KEY: self._delete,
            QueryType.APPEND: self._append,
            QueryType.MULTI_GET: self._get_several,
            QueryType.MULTI_SET: lambda query, _: self._set(query.read_items()),
            QueryType.CANCEL_WAIT: self._cancel_wait,
            QueryType.QUEUE_PUSH: self._push,
            QueryType.QUEUE_POP: self._pop,
            QueryType.QUEUE_LEN: lambda query, _: _SIGNED.pack(len(self._queues.get(query.read_text(), ()))),
            QueryType.LIST_KEYS: self._list_keys,
            QueryType.BARRIER: self._barrier,
        }

    def answer(self, kind: int, query: Query, client: StoreClient) -> bytes:
        """Carry out a query, and return what to send: nothing, if it has no answer or the client has to wait.

        Raises IncompleteQuery before anything has changed; InvalidQuery, ValueError or struct.error for a client that
        breaks the protocol.
        """
        if kind not in self._answers:
            raise InvalidQuery
        return self._answers[QueryType(kind)](query, client)

    def forget(self, client: StoreClient) -> None:
        """Let a client wait for nothing any more."""
        for key in client.awaited:
            left = [each for each in self._waiting.pop(key, ()) if each is not client]
            if left:
                self._waiting[key] = left
        client.awaited = set()

    def _set(self, items: Mapping[bytes, bytes]) -> bytes:
        for key, value in items.items():
            self._by_key[key] = value
            self._wake(key)
        return b""

    def _compare_and_set(self, query: Query, _client: StoreClient) -> bytes:
        key, expected, new = query.read_text(), query.read_text(), query.read_text()
        if key not in self._by_key and expected:
            return pack_text(expected)  # as torch's server answers
        if self._by_key.get(key, b"") == expected:
            self._set({key: new})
        return pack_text(self._by_key[key])

    def _add(self, key: bytes, amount: int) -> int:
        total = int(self._by_key.get(key, b"0")) + amount
        self._set({key: str(total).encode()})
        return total

    def _has_all(self, keys: Sequence[bytes]) -> bool:
        return all(key in self._by_key or self._queues.get(key) for key in keys)

    def _wait(self, query: Query, client: StoreClient) -> bytes:
        keys = query.read_texts()
        if self._has_all(keys):
            return _STOP_WAITING
        self._make_wait(client, {key for key in keys if not self._has_all([key])})
        return b""

    def _make_wait(self, client: StoreClient, keys: set[bytes]) -> None:
        client.awaited = keys
        for key in keys:
            self._waiting.setdefault(key, []).append(client)

    def _delete(self, query: Query, _client: StoreClient) -> bytes:
        return _SIGNED.pack(int(self._by_key.pop(query.read_text(), None) is not None))

    def _append(self, query: Query, _client: StoreClient) -> bytes:
        key, value = query.read_text(), query.read_text()
        return self._set({key: self._by_key.get(key, b"") + value})

    def _get_several(self, query: Query, _client: StoreClient) -> bytes:
        return b"".join(pack_text(self._by_key.get(key, b"")) for key in query.read_texts())

    def _cancel_wait(self, _query: Query, client: StoreClient) -> bytes:
        self.forget(client)
        return _WAIT_CANCELED

    def _push(self, query: Query, _client: StoreClient) -> bytes:
        key, value = query.read_text(), query.read_text()
        self._queues.setdefault(key, deque()).append(value)
        self._wake(key, only_first=True)
        return b""

    def _pop(self, query: Query, _client: StoreClient) -> bytes:
        queue = self._queues.get(query.read_text())
        return _SIGNED.pack(len(queue)) + pack_text(queue.popleft()) if queue else _SIGNED.pack(0)

    def _list_keys(self, _query: Query, _client: StoreClient) -> bytes:
        return _SIGNED.pack(len(self._by_key)) + b"".join(map(pack_text, self._by_key))

    def _barrier(self, query: Query, client: StoreClient) -> bytes:
        key, size = query.read_text(), query.read_number(_SIGNED)
        count = int(self._by_key.get(key, b"0")) + 1
        self._by_key[key] = str(count).encode()
        if count < size:
            self._make_wait(client, {key})
            return b""
        self._wake(key)
        return _STOP_WAITING

    def _wake(self, key: bytes, *, only_first: bool = False) -> None:
        clients = self._waiting.pop(key, [])
        if only_first and clients[1:]:
            clients, self._waiting[key] = clients[:1], clients[1:]
        for client in clients:
            client.awaited.discard(key)
            if not client.awaited:
                client.send(_STOP_WAITING)


MAX_NEW_CLIENT_BYTES = 4096
"""How much a client may have sent before it has shown that it knows the token."""
MAX_UNSENT_BYTES = 256 << 20
_READ_BYTES = 1 << 18
_ACCEPTS_PER_POLL = 64
_POLL_SECONDS = 1.0
_CHALLENGE, _PROOF = f"/{CHALLENGE_KEY}".encode(), f"/{PROOF_KEY}".encode()
"""With the slash that TCPStore puts before each key."""
_STOP_WAITING = b"\0"


class StoreServer:
    """Serves a run's store in a thread of its own until `close`. Its methods may be called from any thread."""

    def __init__(self, listening: Sequence[socket.socket], *, token: str) -> None:
        """Start to serve.

        Args:
            listening: Sockets that listen. The server closes them at its end.
            token: What clients must know.
        """
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._rounds: dict[int, StoreValues | None] = {}
        """None for a round that has ended."""
        self._prefixes: dict[bytes, int] = {}
        """The round of each prefix of keys."""
        self._clients: set[StoreClient] = set()
        self._new_clients: NewClients[StoreClient] = NewClients(self._drop)
        self._requests: deque[Callable[[], None]] = deque()
        self._wakeup, self._waker = socket.socketpair()
        self._wakeup.setblocking(False)
        self._is_ending = False
        self._listening: list[socket.socket] = []
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        for each in listening:
            self._add_socket(each)
        self._thread = threading.Thread(target=self._serve, name="rankless store", daemon=True)
        self._thread.start()

    def __enter__(self) -> "StoreServer":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def listen(self, listening: socket.socket) -> None:
        """Serve on one more socket."""
        self._request(lambda: self._add_socket(listening))

    def end_round(self, number: int) -> None:
        """Close the connections of a round's clients, and accept none of it any more."""
        self._request(lambda: self._end_round(number))

    def close(self) -> None:
        """Stop serving. A rank that waits for a key fails at once."""
        self._is_ending = True
        self._request(lambda: None)
        self._thread.join()

    def _request(self, request: Callable[[], None]) -> None:
        self._requests.append(request)
        with contextlib.suppress(OSError):  # the thread has ended
            self._waker.send(b".")

    def _serve(self) -> None:
        """Serve until `close`. If a fault of ours ends this thread, clients find their connections closed."""
        try:
            while not self._is_ending:
                for key, events in self._selector.select(_POLL_SECONDS):
                    if isinstance(key.data, StoreClient):
                        self._exchange(key.data, events)
                    elif key.data is not None:
                        self._accept(key.data)
                    else:
                        self._take_requests()
                self._new_clients.drop_late(time.monotonic())
        finally:
            for client in list(self._clients):
                self._drop(client)
            for each in (*self._listening, self._wakeup, self._waker):
                each.close()
            self._selector.close()

    def _take_requests(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(_READ_BYTES)
        while self._requests:
            self._requests.popleft()()

    def _add_socket(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._listening.append(listening)
        self._selector.register(listening, selectors.EVENT_READ, listening)

    def _end_round(self, number: int) -> None:
        values, self._rounds[number] = self._rounds.get(number), None
        if values is not None:
            for client in [each for each in self._clients if each.values is values]:
                self._drop(client)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_POLL):
            try:
                connection, _ = listening.accept()
            except OSError:  # no more clients, or no descriptors
                return
            client = StoreClient(connection, self._flush)
            self._clients.add(client)
            self._selector.register(connection, selectors.EVENT_READ, client)
            self._new_clients.add(client, time.monotonic())

    def _exchange(self, client: StoreClient, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(client)
        if client not in self._clients or not events & selectors.EVENT_READ:
            return  # an earlier event has dropped it
        try:
            data = client.connection.recv(_READ_BYTES)
            client.incoming += data
            if data:
                self._answer_all(client)
            else:
                self._drop(client)
        except BlockingIOError:
            pass
        except (OSError, InvalidQuery, ValueError, struct.error, msgspec.MsgspecError):
            self._drop(client)

    def _answer_all(self, client: StoreClient) -> None:
        """Answer the queries that have arrived as a whole."""
        while client.incoming and client in self._clients:
            if client.values is None and len(client.incoming) > MAX_NEW_CLIENT_BYTES:
                raise InvalidQuery
            query = Query(client.incoming)
            try:
                answer = self._answer(client, query.read(1)[0], query)
            except IncompleteQuery:
                return
            del client.incoming[: query.position]
            client.send(answer)

    def _answer(self, client: StoreClient, kind: int, query: Query) -> bytes:
        if not client.is_valid:
            if kind != QueryType.VALIDATE or query.read_number(SHORT) != MAGIC_NUMBER:
                raise InvalidQuery
            client.is_valid = True
            return b""
        if kind == QueryType.PING:
            return query.read(SHORT.size)
        if client.values is not None:
            return client.values.answer(kind, query, client)
        return self._answer_new_client(client, kind, query)

    def _answer_new_client(self, client: StoreClient, kind: int, query: Query) -> bytes:
        """Send the challenge, and check the answer to it. A new client gets nothing else. See Note [clones], too."""
        start = query.position
        key = query.read_first_key(kind)
        if key == _CHALLENGE:
            return _STOP_WAITING if kind == QueryType.WAIT else pack_text(client.challenge.encode())
        if kind == QueryType.COMPARE_SET and key == _PROOF:
            return self._check_proof(client, query)
        round = self._prefixes.get(key.removeprefix(b"/").partition(b"/")[0])
        if round is None:
            raise InvalidQuery
        if not self._admit(client, round):
            raise InvalidQuery
        query.position = start
        return self._answer(client, kind, query)

    def _check_proof(self, client: StoreClient, query: Query) -> bytes:
        query.read_text()
        proof = msgspec.json.decode(query.read_text(), type=StoreProof)
        if not is_proof_right(self._token, client.challenge, proof):
            return pack_text(REFUSED)  # the client leaves, or its time runs out
        if not self._admit(client, proof.round):
            return pack_text(ROUND_ENDED)
        self._prefixes[key_prefix(self._token, proof.round).encode()] = proof.round
        return pack_text(prove_to_client(self._token, client.challenge, proof).encode())

    def _admit(self, client: StoreClient, round: int) -> bool:
        """Serve a client from now on, unless its round has ended."""
        client.values = self._rounds.setdefault(round, StoreValues())
        if client.values is None:
            return False
        self._new_clients.remove(client)
        return True

    def _flush(self, client: StoreClient) -> None:
        """Send what the client takes; wait for it to take more."""
        try:
            while client.outgoing:
                del client.outgoing[: client.connection.send(client.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        if len(client.outgoing) > MAX_UNSENT_BYTES:
            self._drop(client)
        elif client.waits_for_write != bool(client.outgoing):
            client.waits_for_write = bool(client.outgoing)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.waits_for_write else 0)
            self._selector.modify(client.connection, events, client)

    def _drop(self, client: StoreClient) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._new_clients.remove(client)
            if client.values is not None:
                client.values.forget(client)
            self._selector.unregister(client.connection)
            client.connection.close()
