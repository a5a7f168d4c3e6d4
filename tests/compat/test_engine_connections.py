"""Messages between ranks: whole, in order, and not lost when a side leaves."""

import socket
import threading

import pytest

from rankless.compat.horovod.engine.connections import FRAME_FORMAT, MOST_SAID, Closed, Link, see_off


def pair() -> tuple[Link, Link]:
    one, other = socket.socketpair()
    return Link(one), Link(other)


def received(link: Link) -> list[tuple[bytes, bytes]]:
    return list(link.receive())


def until_closed(link: Link) -> list[tuple[bytes, bytes]]:
    found: list[tuple[bytes, bytes]] = []
    while True:
        try:
            found += link.receive()
        except Closed:
            return found


def test_messages_arrive_whole_and_in_order():
    one, other = pair()
    sent = [(b"said", b""), (b"", b"values"), (b"both", b"x" * 100_000)]
    for said, values in sent:
        one.send(said, (values,))
    assert received(other) == sent
    assert received(other) == []


def test_what_the_other_side_cannot_take_yet_is_kept_and_sent_later():
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


def test_the_last_words_are_heard_although_something_was_left_unread():
    one, other = pair()
    other.send(b"never read")
    one.send(b"the last")
    leaving = threading.Thread(target=see_off, args=([one],))
    leaving.start()
    assert until_closed(other) == [(b"the last", b"")]
    other.close()
    leaving.join(30)
    assert one.fileno() == -1


def test_what_is_no_message_ends_a_link():
    one, other = socket.socketpair()
    one.sendall(FRAME_FORMAT.pack_header(MOST_SAID + 1, 0))
    with pytest.raises(Closed, match="no message"):
        received(Link(other))
