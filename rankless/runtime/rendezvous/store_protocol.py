"""The protocol of PyTorch's `TCPStore`, from the server's side: queries, and the values that they read and change.

A frame is the number of a query and its fields (`torch/csrc/distributed/c10d/TCPStoreBackend.hpp`). A text or a value
is its length in 8 bytes, then its bytes. Numbers have the byte order of the machine. A newer PyTorch adds queries at
the end of the list.
"""

import enum
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

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


class WaitingClient(Protocol):
    """A client that may wait for keys."""

    awaited: set[bytes]
    """The keys that it still waits for."""

    def send(self, data: bytes) -> None:
        """Send an answer."""
        ...


def pack_text(text: bytes) -> bytes:
    """Return a text as a field of an answer."""
    return _LENGTH.pack(len(text)) + text


class StoreValues:
    """The keys and queues of a store, and the clients that wait for them."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, list[WaitingClient]] = {}
        self._answers: Mapping[QueryType, Callable[[Query, WaitingClient], bytes]] = {
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

    def answer(self, kind: int, query: Query, client: WaitingClient) -> bytes:
        """Carry out a query, and return what to send: nothing, if it has no answer or the client has to wait.

        Raises IncompleteQuery before anything has changed; InvalidQuery, ValueError or struct.error for a client that
        breaks the protocol.
        """
        if kind not in self._answers:
            raise InvalidQuery
        return self._answers[QueryType(kind)](query, client)

    def forget(self, client: WaitingClient) -> None:
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

    def _compare_and_set(self, query: Query, _client: WaitingClient) -> bytes:
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

    def _wait(self, query: Query, client: WaitingClient) -> bytes:
        keys = query.read_texts()
        if self._has_all(keys):
            return _STOP_WAITING
        self._make_wait(client, {key for key in keys if not self._has_all([key])})
        return b""

    def _make_wait(self, client: WaitingClient, keys: set[bytes]) -> None:
        client.awaited = keys
        for key in keys:
            self._waiting.setdefault(key, []).append(client)

    def _delete(self, query: Query, _client: WaitingClient) -> bytes:
        return _SIGNED.pack(int(self._by_key.pop(query.read_text(), None) is not None))

    def _append(self, query: Query, _client: WaitingClient) -> bytes:
        key, value = query.read_text(), query.read_text()
        return self._set({key: self._by_key.get(key, b"") + value})

    def _get_several(self, query: Query, _client: WaitingClient) -> bytes:
        return b"".join(pack_text(self._by_key.get(key, b"")) for key in query.read_texts())

    def _cancel_wait(self, _query: Query, client: WaitingClient) -> bytes:
        self.forget(client)
        return _WAIT_CANCELED

    def _push(self, query: Query, _client: WaitingClient) -> bytes:
        key, value = query.read_text(), query.read_text()
        self._queues.setdefault(key, deque()).append(value)
        self._wake(key, only_first=True)
        return b""

    def _pop(self, query: Query, _client: WaitingClient) -> bytes:
        queue = self._queues.get(query.read_text())
        return _SIGNED.pack(len(queue)) + pack_text(queue.popleft()) if queue else _SIGNED.pack(0)

    def _list_keys(self, _query: Query, _client: WaitingClient) -> bytes:
        return _SIGNED.pack(len(self._by_key)) + b"".join(map(pack_text, self._by_key))

    def _barrier(self, query: Query, client: WaitingClient) -> bytes:
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
