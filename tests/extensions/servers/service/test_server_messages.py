"""Messages that a client never sends are refused, counted, and change nothing."""

import itertools
import json

import msgspec
import numpy as np
import pytest
from raw_worker import RawWorker
from served_training import OPTIMIZERS
from server_processes import servers_of_run

from rankless.extensions.servers.service.wire.joint_messages import SliceMessage
from rankless.extensions.servers.service.wire.messages import HEADER_BYTES, Kind, MessageHeader, make_message
from rankless.extensions.servers.service.wire.setting_formats import encode_optimizer, encode_table_settings
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

SETTINGS = TableSettings(dim=2)
SGD = encode_optimizer(OPTIMIZERS["sgd"])
IDS = np.array([1, 2, 3])
ONES = np.ones(3, np.int64)
GRADIENTS = np.ones((3, 2), np.float32)
PUSH = (SGD, IDS, ONES, GRADIENTS)
HUGE = 2**63


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with servers_of_run(tmp_path_factory.mktemp("s")) as run:
        yield run


@pytest.fixture(scope="module")
def incarnations():
    return itertools.count()


class Conversation:
    """An authenticated worker with an open table, and what the table must hold."""

    def __init__(self, run, incarnation: int) -> None:
        self.process = run.processes[0]
        self.worker = RawWorker(self.process.address, incarnation=incarnation)
        header, (welcome, _) = self.worker.connect(run.token)
        assert header.kind == Kind.WELCOME
        self.transaction = json.loads(welcome)["ready"] + 1
        name = f"table {incarnation}".encode()
        answer, _ = self.worker.ask(Kind.OPEN, name, encode_table_settings(SETTINGS))
        self.table = answer.table
        self.reference = Table(SETTINGS)

    def ask(self, kind: int, *payload, **fields):
        return self.worker.ask(kind, *payload, table=self.table, **fields)

    def push(self, **fields):
        return self.ask(Kind.PUSH, *PUSH, **{"rows": 3, "transaction": self.transaction} | fields)

    def commit(self):
        answer = self.worker.ask(Kind.READY, transaction=self.transaction)
        self.transaction += 1
        return answer

    def check(self) -> None:
        """Compare the table with the reference."""
        answer, (rows,) = self.ask(Kind.PULL, IDS, rows=3, transaction=self.transaction - 1)
        assert answer.kind == Kind.DONE
        np.testing.assert_array_equal(np.frombuffer(rows, np.float32).reshape(3, 2), self.reference.pull(IDS))
        assert answer.start == self.reference.step

    def expect_one_push(self) -> None:
        self.reference.push(IDS, ONES, GRADIENTS, OPTIMIZERS["sgd"])
        self.check()


@pytest.fixture
def conversation(run, incarnations):
    conversation = Conversation(run, next(incarnations))
    yield conversation
    conversation.worker.close()


def test_a_request_that_arrives_twice_is_done_once(conversation):
    worker = conversation.worker
    header = worker.header(Kind.PUSH, table=conversation.table, rows=3, transaction=conversation.transaction)
    for _ in range(5):
        worker.send(header, *PUSH)
    answers = [worker.receive() for _ in range(5)]
    assert {answer.kind for answer, _ in answers} == {Kind.DONE}
    assert {answer.sequence for answer, _ in answers} == {header.sequence}
    worker.sequence += 1
    conversation.commit()
    conversation.expect_one_push()


def test_a_pull_that_arrives_twice_is_answered_with_the_same_rows(conversation):
    worker = conversation.worker
    first, rows = conversation.ask(Kind.PULL, IDS, rows=3)
    worker.send(worker.header(Kind.PULL, sequence=worker.sequence, table=conversation.table, rows=3), IDS)
    again, same_rows = worker.receive()
    assert (first, rows) == (again, same_rows)


def test_a_request_before_its_predecessor_is_not_done(conversation):
    worker, transaction = conversation.worker, conversation.transaction
    ready = worker.header(Kind.READY, transaction=transaction)._replace(sequence=worker.sequence + 2)
    worker.send(ready)
    answer, _ = worker.receive()
    assert (answer.kind, answer.sequence) == (Kind.EXPECTED, worker.sequence + 1)
    conversation.push()
    conversation.commit()
    conversation.expect_one_push()


def test_an_acknowledged_request_is_not_answered_again(conversation):
    worker = conversation.worker
    conversation.push()
    old = worker.sequence
    conversation.push(acknowledged=old)
    worker.send(worker.header(Kind.PUSH, table=conversation.table, sequence=old, rows=3), *PUSH)
    answer, (reason,) = worker.receive()
    assert (answer.kind, reason) == (Kind.REFUSED, b"a request whose answer was acknowledged")


def test_too_many_requests_in_flight_are_refused(conversation):
    worker = conversation.worker
    kinds = [conversation.ask(Kind.PULL, IDS, rows=3)[0].kind for _ in range(20)]
    assert Kind.REFUSED in kinds
    answer, _ = conversation.ask(Kind.PULL, IDS, rows=3, acknowledged=worker.sequence)
    assert answer.kind == Kind.DONE


@pytest.mark.parametrize(
    ("numbers", "ids", "rows", "reason"),
    [
        ([], IDS, 3, b"a pull of a wrong number of tables"),
        ([[0, 3], [0, 1]], IDS, 3, b"a pull with wrong numbers of tables or ids"),
        ([[0, 2]], IDS, 3, b"a pull with wrong numbers of tables or ids"),
        ([[0, 4], [0, -1]], IDS, 3, b"a pull with wrong numbers of tables or ids"),
        ([[-1, 3]], IDS, 3, b"a pull with wrong numbers of tables or ids"),
        ([[0, 3]], IDS[:2], 3, b"an array of the wrong size"),
        ([[0, 2**62]], IDS, 2**62, b"an array of the wrong size"),
        ([[5000, 3]], IDS, 3, b"an unknown table"),
    ],
)
def test_a_wrong_pull_from_several_tables_is_refused(conversation, numbers, ids, rows, reason):
    answer, (found,) = conversation.ask(Kind.PULL_SEVERAL, np.array(numbers, np.int64), ids, rows=rows)
    assert (answer.kind, found) == (Kind.REFUSED, reason)
    conversation.check()


def test_a_pull_from_several_tables_without_one_of_its_frames_is_refused(conversation):
    answer, (found,) = conversation.ask(Kind.PULL_SEVERAL, np.array([[0, 3]]), rows=3)
    assert (answer.kind, found) == (Kind.REFUSED, b"a wrong number of payload frames")
    answer, (found,) = conversation.ask(Kind.PULL_SEVERAL, np.array([0, 3, 1], np.int32), IDS, rows=3)
    assert (answer.kind, found) == (Kind.REFUSED, b"a pull of a wrong number of tables")


WRONG_SLICES = {
    "no tables": ([], PUSH[1:], 3, b"slices of a wrong number of tables"),
    "more rows than ids": ([(0, 3), (0, 1)], PUSH[1:], 3, b"slices with wrong numbers of tables or rows"),
    "negative rows": ([(0, 4), (0, -1)], PUSH[1:], 3, b"slices with wrong numbers of tables or rows"),
    "a negative table": ([(-1, 3)], PUSH[1:], 3, b"slices with wrong numbers of tables or rows"),
    "an unknown table": ([(5000, 3)], PUSH[1:], 3, b"an unknown table"),
    "an unknown table of no rows": ([(0, 3), (5000, 0)], PUSH[1:], 3, b"an unknown table"),
    "fewer ids": ([(0, 3)], (IDS[:2], ONES, GRADIENTS), 3, b"an array of the wrong size"),
    "fewer occurrences": ([(0, 3)], (IDS, ONES[:2], GRADIENTS), 3, b"an array of the wrong size"),
    "fewer gradients": ([(0, 2), (0, 1)], (IDS, ONES, GRADIENTS[:2]), 3, b"an array of the wrong size"),
    "more gradients": ([(0, 3)], (IDS, ONES, np.ones((4, 2), np.float32)), 3, b"an array of the wrong size"),
    "rows beyond memory": ([(0, 2**62)], PUSH[1:], 2**62, b"an array of the wrong size"),
    "a frame less": ([(0, 3)], (IDS, ONES), 3, b"a wrong number of payload frames"),
    "negative occurrences": ([(0, 2), (0, 1)], (IDS, -ONES, GRADIENTS), 3, b"occurrences out of range"),
    "no JSON": (b"[[0,3]", PUSH[1:], 3, b"JSON that is not understood"),
    "JSON of something else": (b'{"table":0}', PUSH[1:], 3, b"JSON that is not understood"),
}


@pytest.mark.parametrize("kind", [Kind.PUSH_SEVERAL, Kind.PREPARE_SEVERAL])
@pytest.mark.parametrize("name", WRONG_SLICES)
def test_wrong_slices_of_several_tables_change_nothing(conversation, name, kind):
    slices, arrays, rows, reason = WRONG_SLICES[name]
    settings = SGD.decode() if kind == Kind.PUSH_SEVERAL else ""
    if not isinstance(slices, bytes):
        slices = msgspec.json.encode([SliceMessage(table, each, settings) for table, each in slices])
    answer, (found,) = conversation.ask(kind, slices, *arrays, rows=rows, transaction=conversation.transaction)
    assert answer.kind == Kind.REFUSED
    assert found.startswith(reason)
    conversation.check()
    conversation.push()
    conversation.commit()
    conversation.expect_one_push()


def test_a_wrong_slice_after_a_right_one_changes_nothing(conversation):
    """The settings of the second slice are none: the first one must not count either."""
    slices = msgspec.json.encode([SliceMessage(conversation.table, 2, SGD.decode()), SliceMessage(0, 1, "[]")])
    transaction = conversation.transaction
    answer, _ = conversation.ask(Kind.PUSH_SEVERAL, slices, *PUSH[1:], rows=3, transaction=transaction)
    assert answer.kind == Kind.FAILED
    conversation.push()
    conversation.commit()
    conversation.expect_one_push()


WRONG = {
    "another magic": lambda m: [b"XXXX" + m[0][4:], *m[1:]],
    "another version": lambda m: [m[0][:4] + b"\x09" + m[0][5:], *m[1:]],
    "unknown kind": lambda m: [m[0][:5] + b"\x7f" + m[0][6:], *m[1:]],
    "kind of an answer": lambda m: [m[0][:5] + bytes([Kind.DONE]) + m[0][6:], *m[1:]],
    "short header": lambda m: [m[0][:-1], *m[1:]],
    "long header": lambda m: [m[0] + b"\0", *m[1:]],
    "empty header": lambda m: [b"", *m[1:]],
    "no payload": lambda m: m[:1],
    "a frame less": lambda m: m[:-1],
    "a frame more": lambda m: [*m, b""],
    "many frames": lambda m: [*m, *[b"x"] * 500],
    "short ids": lambda m: [m[0], m[1], m[2][:-8], *m[3:]],
    "odd ids": lambda m: [m[0], m[1], bytes(m[2])[:-1], *m[3:]],
    "frames exchanged": lambda m: [m[0], m[2], m[1], *m[3:]],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_damaged_push_changes_nothing(conversation, name):
    worker = conversation.worker
    header = worker.header(Kind.PUSH, table=conversation.table, rows=3, transaction=conversation.transaction)
    worker.socket.send_multipart(WRONG[name](make_message(header, PUSH)))
    worker.send(MessageHeader(Kind.HELLO))  # answered after whatever the damaged message causes
    while worker.receive()[0].kind != Kind.CHALLENGE:
        pass
    conversation.check()
    conversation.push()
    conversation.commit()
    conversation.expect_one_push()


FIELDS = {
    "rows": [0, 2, 4, 2**61, 2**61 + 3, HUGE, 2**64 - 1],
    "table": [5000, 2**32 - 1],
    "transaction": [0, 10**6, HUGE, 2**64 - 1],
    "acknowledged": [10**6, 2**64 - 1],
    "session": [0, 1, 2**64 - 1],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in FIELDS for value in FIELDS[field]])
def test_a_push_with_a_wrong_number_changes_nothing(conversation, field, value):
    worker = conversation.worker
    fields = {"rows": 3, "table": conversation.table, "transaction": conversation.transaction} | {field: value}
    worker.send(worker.header(Kind.PUSH, **fields), *PUSH)
    worker.send(MessageHeader(Kind.HELLO))
    kinds = []
    while not kinds or kinds[-1] != Kind.CHALLENGE:
        kinds.append(worker.receive()[0].kind)
    refused = Kind.NO_SESSION if field == "session" else Kind.REFUSED
    assert kinds in ([refused, Kind.CHALLENGE], [Kind.CHALLENGE])
    conversation.check()
    conversation.push()
    conversation.commit()
    conversation.expect_one_push()


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_worker_does_not_leave_before_its_part_is_committed(tmp_path, is_ready):
    with servers_of_run(tmp_path, workers=2) as run, RawWorker(run.processes[0].address, worker_count=2) as worker:
        worker.connect(run.token)
        table = worker.ask(Kind.OPEN, b"t", encode_table_settings(SETTINGS))[0].table
        worker.ask(Kind.PUSH, *PUSH, table=table, rows=3, transaction=1)
        if is_ready:
            worker.ask(Kind.READY, transaction=1)
        answer, (reason,) = worker.ask(Kind.LEAVE)
        assert answer.kind == Kind.REFUSED
        assert reason == b"a worker that leaves before its part of a transaction is committed"


@pytest.mark.parametrize("value", [-1, np.iinfo(np.int64).min, np.iinfo(np.int64).max, 2**32 + 1])
def test_occurrences_out_of_range_are_refused(conversation, value):
    payload = (SGD, IDS, np.array([1, value, 1]), GRADIENTS)
    answer, _ = conversation.ask(Kind.PUSH, *payload, rows=3, transaction=conversation.transaction)
    assert answer.kind == Kind.REFUSED
    conversation.check()


@pytest.mark.parametrize(
    "settings",
    [
        b"",
        b"null",
        b'["S\xbc",{}]',
        b'["SgdSettings",{"lr":"0.1"}]',
        b'["SgdSettings",{"lr":null}]',
        b'["Adam",{"lr":0.1}]',
        b'["SparseAdamSettings",{"lr":0.1,"betas":[1.0,0.9]}]',
        b'["SparseAdamSettings",{"lr":0.1,"betas":[0.9,-1.0]}]',
        b'["AdagradSettings",{"lr":0.1,"lr_decay":-1.0}]',
        b"[" * 5000,
        b'["SgdSettings",{"lr":' + b"[" * 100_000,
    ],
)
def test_settings_of_no_optimizer_fail_and_change_nothing(conversation, settings):
    payload = (settings, IDS, ONES, GRADIENTS)
    answer, _ = conversation.ask(Kind.PUSH, *payload, rows=3, transaction=conversation.transaction)
    assert answer.kind == Kind.FAILED
    conversation.push()
    conversation.commit()
    conversation.expect_one_push()


@pytest.mark.parametrize(
    "text",
    [
        {"dim": 0},
        {"dim": 2**40},
        {"dim": -1},
        {"dim": 10**30},
        {"dtype": "float16"},
        {"seed": -1},
        {"seed": 2**64},
        {"initial": ["Normal", {"sigma": 1}]},
        {"initial": ["__import__", {}]},
        {"admission": ["ByCount", {}]},
        {"admission": ["ByCount", {"occurrences": 1e300}]},
        {"max_rows": 2**63},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_table_with_wrong_settings_cannot_be_opened(conversation, text):
    settings = json.dumps(json.loads(encode_table_settings(SETTINGS)) | text).encode()
    answer, _ = conversation.worker.ask(Kind.OPEN, b"another", settings)
    assert answer.kind == Kind.FAILED
    conversation.check()


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in (Kind.HELLO, Kind.PROVE)])
def test_nothing_is_done_without_a_session(run, conversation, kind):
    with RawWorker(run.processes[0].address) as stranger:
        for session in (0, conversation.worker.session):  # another worker's number does not help, either
            header = MessageHeader(kind, session=session, sequence=conversation.worker.sequence + 1, rows=3)
            stranger.send(header._replace(table=conversation.table, transaction=conversation.transaction), *PUSH)
            answer, payload = stranger.receive()
            assert (answer.kind, payload) == (Kind.NO_SESSION, [])
    conversation.check()


def test_a_pull_that_would_be_too_large_is_refused(conversation):
    answer, _ = conversation.ask(Kind.PULL, rows=2**40)
    assert answer.kind == Kind.REFUSED
    answer, _ = conversation.ask(Kind.PULL, IDS, rows=3, transaction=conversation.transaction)
    assert answer.kind == Kind.REFUSED  # it would wait for ever
    conversation.check()


@pytest.mark.parametrize("kind", [Kind.CONTENTS_PART, Kind.RESTORE_PART, Kind.RESTORE_END])
def test_parts_of_contents_need_a_beginning(conversation, kind):
    assert conversation.ask(kind, *([b""] * 3 if kind == Kind.RESTORE_PART else []))[0].kind == Kind.REFUSED
    conversation.check()


@pytest.mark.parametrize("frame", [b"", b"\0" * HEADER_BYTES, b"GET / HTTP/1.1\r\n"])
def test_bytes_of_another_protocol_are_dropped(run, conversation, frame):
    with RawWorker(run.processes[0].address) as stranger:
        stranger.socket.send_multipart([frame])
        stranger.socket.send_multipart([frame, frame])
        stranger.barrier()
        assert stranger.is_silent()
    conversation.check()
