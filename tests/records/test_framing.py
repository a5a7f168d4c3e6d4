"""Frames: messages leave a byte stream as they entered it, however the stream is cut."""

import socket
from pathlib import Path

import pytest

from rankless.records.framing import FrameDecoder, FrameFormat, FrameTooLongError, read_messages, receive_message

FORMAT = FrameFormat(">I")
WITH_ATTACHMENT = FrameFormat("<II")
MESSAGES = [b"first", b"", b"x" * 1000]


@pytest.mark.parametrize("piece_bytes", [1, 3, 4096])
def test_messages_are_yielded_once_and_in_order_however_the_stream_is_cut(piece_bytes: int):
    stream = b"".join(map(FORMAT.encode, MESSAGES))
    decoder = FrameDecoder(FORMAT, max_bytes=1000)
    found: list[bytes] = []
    for start in range(0, len(stream), piece_bytes):
        decoder.feed(stream[start : start + piece_bytes])
        found += decoder.messages()
    assert found == MESSAGES
    assert decoder.buffered_bytes == 0


@pytest.mark.parametrize("piece_bytes", [1, 3, 4096])
def test_attachments_stay_with_their_messages(piece_bytes: int):
    sent = [(b"message", b""), (b"", b"attachment"), (b"both", b"y" * 1000)]
    stream = b"".join(
        WITH_ATTACHMENT.encode_with_attachment(message, attachment[:3], attachment[3:]) for message, attachment in sent
    )
    decoder = FrameDecoder(WITH_ATTACHMENT, max_bytes=10, max_attachment_bytes=1000)
    found: list[tuple[bytes, bytes]] = []
    for start in range(0, len(stream), piece_bytes):
        decoder.feed(stream[start : start + piece_bytes])
        found += decoder.messages_with_attachments()
    assert found == sent


def test_a_reader_that_stops_early_finds_only_the_rest_next_time():
    decoder = FrameDecoder(FORMAT, max_bytes=1000)
    decoder.feed(b"".join(map(FORMAT.encode, MESSAGES)))
    for message in decoder.messages():
        assert message == MESSAGES[0]
        break
    assert list(decoder.messages()) == MESSAGES[1:]


def test_a_header_above_the_limit_raises_before_its_message_arrives():
    decoder = FrameDecoder(FORMAT, max_bytes=10)
    decoder.feed(FORMAT.encode(b"short") + FORMAT.pack_header(11))
    messages = decoder.messages()
    assert next(messages) == b"short"
    with pytest.raises(FrameTooLongError) as caught:
        next(messages)
    assert caught.value.length == 11


def test_an_attachment_above_its_limit_raises():
    decoder = FrameDecoder(WITH_ATTACHMENT, max_bytes=10, max_attachment_bytes=20)
    decoder.feed(WITH_ATTACHMENT.pack_header(10, 21))
    with pytest.raises(FrameTooLongError) as caught:
        list(decoder.messages_with_attachments())
    assert caught.value.length == 21


def test_the_limit_may_rise_between_two_messages():
    decoder = FrameDecoder(FORMAT, max_bytes=5)
    decoder.feed(FORMAT.encode(b"short") + FORMAT.encode(b"longer than five"))
    found = []
    for message in decoder.messages():
        found.append(message)
        decoder.max_bytes = 100
    assert found == [b"short", b"longer than five"]


def test_a_file_is_read_up_to_its_last_complete_frame(tmp_path: Path):
    path = tmp_path / "frames"
    stream = b"".join(map(FORMAT.encode, MESSAGES))
    path.write_bytes(stream + FORMAT.pack_header(7) + b"partial"[:3])
    assert list(read_messages(path, FORMAT)) == MESSAGES
    path.write_bytes(stream + b"\0\0")
    assert list(read_messages(path, FORMAT)) == MESSAGES


def test_a_blocking_reader_gets_whole_messages_and_none_at_the_end():
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.sendall(FORMAT.encode(b"whole") + FORMAT.pack_header(9) + b"cut")
        writer.shutdown(socket.SHUT_WR)
        assert receive_message(reader, FORMAT) == b"whole"
        assert receive_message(reader, FORMAT) is None
