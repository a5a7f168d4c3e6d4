"""Messages between ranks arrive whole and in order, and are not lost when a side closes."""

import socket
import threading

import pytest

from rankless.extensions.horovod.engine.connections import (
    FRAME_FORMAT,
    MAX_MESSAGE_BYTES,
    ConnectionClosed,
    RankConnection,
    close_gracefully,
)


def pair() -> tuple[RankConnection, RankConnection]:
    one, other = socket.socketpair()
    return RankConnection(one), RankConnection(other)


def received(connection: RankConnection) -> list[tuple[bytes, bytes]]:
    return list(connection.receive())


def until_closed(connection: RankConnection) -> list[tuple[bytes, bytes]]:
    found: list[tuple[bytes, bytes]] = []
    while True:
        try:
            found += connection.receive()
        except ConnectionClosed:
            return found


def test_messages_arrive_whole_and_in_order():
    one, other = pair()
    sent = [(b"message", b""), (b"", b"values"), (b"both", b"x" * 100_000)]
    for message, values in sent:
        one.send(message, (values,))
    assert received(other) == sent
    assert received(other) == []


def test_a_message_that_the_other_side_cannot_take_yet_is_sent_later():
    one, other = pair()
    values = b"x" * 10_000_000
    one.send(b"a", (values,))
    assert one.has_more_to_send
    found: list[tuple[bytes, bytes]] = []
    while not found:
        one.flush()
        found = received(other)
    assert found == [(b"a", values)]
    assert not one.has_more_to_send


def test_the_last_message_arrives_although_other_data_was_left_unread():
    one, other = pair()
    other.send(b"never read")
    one.send(b"the last")
    leaving = threading.Thread(target=close_gracefully, args=([one],))
    leaving.start()
    assert until_closed(other) == [(b"the last", b"")]
    other.close()
    leaving.join(30)
    assert one.fileno() == -1


def test_invalid_data_closes_a_connection():
    one, other = socket.socketpair()
    one.sendall(FRAME_FORMAT.pack_header(MAX_MESSAGE_BYTES + 1, 0))
    with pytest.raises(ConnectionClosed, match="no message"):
        received(RankConnection(other))
