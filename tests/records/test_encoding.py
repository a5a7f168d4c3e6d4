"""Records and messages are encoded whatever text they hold."""

import io
import math
import socket
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rankless.cli.json_output import JsonHeader
from rankless.launch.worker_output import TerminalStreams
from rankless.records.elastic_driver_protocol import DriverMessage, WorkerMessage
from rankless.records.encoding import encode_json, encode_msgpack
from rankless.records.events import AnyRecord, Notice, Raised, open_channel, receive_records, send_record
from rankless.records.job_programs import ProgramRecord
from rankless.records.live_run import LiveRun
from rankless.records.run_json_format import RunSummary
from rankless.records.run_status import RunStatus
from rankless.records.server_traffic_counters import ServerActivity
from rankless.records.verify_recording_format import ResultRecord
from rankless.terminal.cursor_tracker import CursorTracker
from tests.support.structs import values_of

ANY_TEXT = st.text(st.characters(), max_size=8) | st.sampled_from(["caf\udce9.png", "\0", "\x1b[2J", "\ud83d\ude00"])
"""Any code points, lone surrogates and controls among them."""
_PHASES = [Phase.explicit, Phase.generate]  # a failing example is small enough
JSON_TYPES: list[Any] = [RunSummary, LiveRun, RunStatus, ServerActivity, JsonHeader, *get_args(ProgramRecord)]
MSGPACK_TYPES: list[Any] = [*get_args(DriverMessage), *get_args(WorkerMessage), *get_args(ResultRecord)]


@pytest.mark.parametrize("kind", get_args(AnyRecord), ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None, phases=_PHASES)
@given(data=st.data())
def test_every_record_arrives_whatever_its_texts(kind: type[AnyRecord], data: st.DataObject):
    record = data.draw(values_of(kind, ANY_TEXT))
    reader, writer = open_channel()
    with reader, writer:
        reader.setblocking(False)
        send_record(record, descriptor=writer.fileno())
        (received,), _ = receive_records(reader)
    assert type(received) is kind
    assert msgspec.to_builtins(received) == escaped(msgspec.to_builtins(record))


@pytest.mark.parametrize("kind", [*JSON_TYPES, *MSGPACK_TYPES], ids=lambda kind: kind.__name__)
@settings(max_examples=10, deadline=None, phases=_PHASES)
@given(data=st.data())
@pytest.mark.ci_sample(6)
def test_every_message_and_file_is_encoded_whatever_its_texts(kind: type[msgspec.Struct], data: st.DataObject):
    value = data.draw(values_of(kind, ANY_TEXT))
    text = encode_json(value) if kind in JSON_TYPES else encode_msgpack(value)
    module = msgspec.json if kind in JSON_TYPES else msgspec.msgpack
    assert type(module.decode(text, type=kind)) is kind


def escaped(plain: Any) -> Any:
    if isinstance(plain, str):
        return plain.encode(errors="backslashreplace").decode()
    if isinstance(plain, dict):
        return {escaped(key): escaped(item) for key, item in plain.items()}
    return type(plain)(escaped(item) for item in plain) if isinstance(plain, list | tuple) else plain


@pytest.mark.parametrize("letter", ["x", "\udce9", "é", "\0"])
def test_a_record_of_any_length_arrives_with_the_ends_of_its_texts(letter: str):
    reader, writer = open_channel()
    with reader, writer:
        reader.setblocking(False)
        text = f"start {letter * 1_000_000} end"
        send_record(
            Raised(rank=3, time_ns=0, error_type=text, message=text, traceback=text), descriptor=writer.fileno()
        )
        (received,), _ = receive_records(reader)
    assert isinstance(received, Raised)
    assert received.rank == 3
    assert received.traceback.endswith(" end")
    assert received.message.startswith("start ")


@settings(max_examples=200, deadline=None, phases=_PHASES)
@given(text=ANY_TEXT, encoding=st.sampled_from(["utf-8", "ascii", "latin-1"]))
def test_the_terminal_shows_any_text_and_no_text_controls_it(text: str, encoding: str):
    file = io.BytesIO()
    err = io.TextIOWrapper(file, encoding=encoding)
    streams = TerminalStreams(out=err, err=err, hide_progress=lambda: socket.socket(), cursor=CursorTracker())
    streams.notify(text)
    shown = file.getvalue().decode(encoding)
    assert all(letter.isprintable() or letter in "\n\t" or letter >= "\xa0" for letter in shown)


def test_numbers_and_bytes_beside_a_text_without_utf8_stay_as_they_are():
    value = {"name": "\udce9", "data": b"\xff\x00", "numbers": (1.5, math.inf, None, True, 2**63), ("a", 1): [b"\xfe"]}
    decoded = msgspec.msgpack.decode(encode_msgpack(value), strict=False)
    assert decoded == {
        "name": "\\udce9",
        "data": b"\xff\x00",
        "numbers": [1.5, math.inf, None, True, 2**63],
        ("a", 1): [b"\xfe"],
    }


def test_a_notice_of_a_file_that_is_not_utf8_is_readable():
    reader, writer = open_channel()
    with reader, writer:
        reader.setblocking(False)
        text = f"ranks 0 and 1 both write {Path(chr(0xDCE9))}"
        send_record(Notice(rank=0, time_ns=0, text=text), descriptor=writer.fileno())
        (received,), _ = receive_records(reader)
    assert isinstance(received, Notice)
    assert received.text == "ranks 0 and 1 both write \\udce9"
