"""A rank's coordinator client without processes: when it submits cache ids, and when full descriptions."""

import selectors
import socket
from collections.abc import Iterator, Sequence

import pytest

from rankless.extensions.horovod.engine.coordinator_client import RemoteCoordinatorClient, ShutdownReceived
from rankless.extensions.horovod.engine.messages import (
    CacheMiss,
    CoordinatorMessage,
    Execute,
    OperationResponse,
    RankMessage,
    RequestMetadata,
    Submit,
    SubmitCached,
    decode_rank_message,
    encode,
)


class FakeConnection:
    """A connection whose other side is the test."""

    has_more_to_send = False

    def __init__(self) -> None:
        self._ends = socket.socketpair()
        self.sent: list[RankMessage] = []
        self.replies: list[CoordinatorMessage] = []

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def enqueue(self, data: bytes, _values: Sequence[bytes] = ()) -> None:
        self.sent.append(decode_rank_message(data))

    send = enqueue

    def flush(self) -> None:
        return

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        replies, self.replies = self.replies, []
        return iter([(encode(one), b"") for one in replies])

    def close(self) -> None:
        for end in self._ends:
            end.close()


@pytest.fixture
def connection() -> Iterator[FakeConnection]:
    made = FakeConnection()
    yield made
    made.close()


def make_client(connection: FakeConnection, capacity: int) -> RemoteCoordinatorClient:
    return RemoteCoordinatorClient(connection, selectors.SelectSelector(), capacity=capacity)  # type: ignore[arg-type]  # it has all the methods that are called


def request(name: str) -> RequestMetadata:
    return RequestMetadata(kind="allreduce", key=name)


def submit(client: RemoteCoordinatorClient, *names: str) -> None:
    for name in names:
        client.submit((0, name), request(name), b"")


def execute(client: RemoteCoordinatorClient, connection: FakeConnection, **cache_ids: int) -> None:
    connection.replies.append(
        Execute(0, tuple(OperationResponse(key=name, cache_id=cache_id) for name, cache_id in cache_ids.items()))
    )
    list(client.receive(is_idle=True))


def test_a_cached_operation_is_submitted_by_its_cache_id(connection: FakeConnection):
    client = make_client(connection, 10)
    submit(client, "a")
    execute(client, connection, a=7)
    submit(client, "a")
    assert connection.sent == [Submit(request("a")), SubmitCached(7)]


def test_a_cache_miss_is_answered_in_full_although_the_client_has_dropped_the_id(connection: FakeConnection):
    client = make_client(connection, 1)
    submit(client, "a", "b")
    execute(client, connection, a=0, b=1)
    submit(client, "a", "c", "d")
    execute(client, connection, c=2, d=3)  # the client keeps twice the capacity: it drops the ids of a and b
    connection.sent.clear()
    connection.replies.append(CacheMiss(0))
    list(client.receive(is_idle=True))
    assert connection.sent == [Submit(request("a"))]


def test_a_miss_of_an_id_that_was_never_submitted_is_an_error(connection: FakeConnection):
    client = make_client(connection, 1)
    submit(client, "a")
    connection.replies.append(CacheMiss(5))
    with pytest.raises(ShutdownReceived, match="asks for cache id 5, which this rank has not submitted"):
        list(client.receive(is_idle=True))
