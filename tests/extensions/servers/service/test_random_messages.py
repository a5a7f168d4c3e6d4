"""Random and damaged messages, thousands of them: the server lives, its tables stay, its memory is bounded."""

import random
import re

import msgspec
import numpy as np
import pytest
from raw_worker import RawWorker
from served_training import OPTIMIZERS, assert_equal_contents, draw_slice, push_sum
from server_processes import servers_of_run

from rankless.extensions.servers.service.wire.joint_messages import SliceMessage
from rankless.extensions.servers.service.wire.messages import Kind, MessageHeader, make_message
from rankless.extensions.servers.service.wire.setting_formats import encode_optimizer, encode_table_settings
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

SETTINGS = TableSettings(dim=3, dtype="float64")
NUMBERS = [0, 1, 2, 3, 7, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
MARK = 10**12
MOST_GROWTH = 96 << 20


def encode_several(slices, settings="") -> bytes:
    """Return the first frame of a message with slices of several tables, of a number of rows each."""
    return msgspec.json.encode([SliceMessage(table, rows, settings) for table, rows in slices])


class MessageMutations:
    """Makes messages that are nearly right. Worker 0 commits nothing meanwhile, so that none may change the table."""

    def __init__(self, worker: RawWorker, seed: int) -> None:
        self._worker = worker
        self._random = random.Random(seed)
        self._payloads = {
            Kind.OPEN: (b"name", encode_table_settings(SETTINGS)),
            Kind.PUSH: (encode_optimizer(OPTIMIZERS["sgd"]), np.arange(4), np.ones(4, np.int64), np.ones((4, 3))),
            Kind.PUSH_SEVERAL: (
                encode_several([(0, 3), (0, 1)], encode_optimizer(OPTIMIZERS["sgd"]).decode()),
                np.arange(4),
                np.ones(4, np.int64),
                np.ones((4, 3)),
            ),
            Kind.PREPARE_SEVERAL: (encode_several([(0, 4)]), np.arange(4), np.ones(4, np.int64), np.ones((4, 3))),
            Kind.PULL: (np.arange(4),),
            Kind.PULL_SEVERAL: (np.array([[0, 3], [0, 1]]), np.arange(4)),
            Kind.RESTORE: (
                b'{"step":1,"optimizer":"","optimizer_steps":0,"initial_state":0,"width":5,"rows":4,"waiting":0}',
            ),
            Kind.RESTORE_PART: (np.arange(4), np.ones((4, 5)), np.ones(4, np.int64)),
        }

    def message(self) -> list[bytes]:
        draw = self._random
        if draw.random() < 0.1:
            return [draw.randbytes(draw.choice([0, 1, 71, 72, 73, 1000])) for _ in range(draw.randrange(1, 8))]
        # A message that ends the worker's transaction, or its part in the run, would be right.
        kinds = {*Kind, *range(100, 256)} - {Kind.READY, Kind.LEAVE}
        kind = draw.choice([*self._payloads, *self._payloads, draw.choice(sorted(kinds))])
        header = self._worker.header(
            kind, rows=4, transaction=draw.choice([0, 1, 2]), acknowledged=self._worker.sequence
        )
        for _ in range(draw.randrange(0, 3)):
            field = draw.choice(header._fields[2:])
            value = draw.choice(NUMBERS)
            header = header._replace(**{field: value % 2**32 if field == "table" else value})
        payload = self._payloads.get(kind, ())
        frames = [bytes(frame) for frame in make_message(header, payload)]
        for _ in range(draw.choice([0, 1, 1, 2])):
            self._damage(frames)
        return frames

    def _damage(self, frames: list[bytes]) -> None:
        draw = self._random
        number = draw.randrange(len(frames))
        frame = bytearray(frames[number])
        match draw.randrange(5):
            case 0:
                del frame[draw.randrange(len(frame) + 1) :]
            case 1:
                frame += draw.randbytes(draw.choice([1, 8, 4000]))
            case 2 if frame:
                frame[draw.randrange(len(frame))] = draw.randrange(256)
            case 3:
                frames.append(bytes(frame))
            case _ if len(frames) > 1:
                del frames[number]
                return
        frames[number] = bytes(frame)


def send_random(address: str, token: str, count: int, incarnation: int) -> None:
    """Send random messages over connections with and without a session, which take turns."""
    worker = RawWorker(address, worker=1, worker_count=2, incarnation=incarnation)
    stranger = RawWorker(address, worker=1, worker_count=2)
    worker.connect(token)
    mutations = MessageMutations(worker, seed=count)
    for number in range(count):
        sender = worker if number % 3 else stranger
        sender.socket.send_multipart(mutations.message())
        if number % 50 == 49:  # so that neither side has more in its queue than it may
            for each in (worker, stranger):
                each.send(MessageHeader(Kind.HELLO, sequence=MARK + number))
                while each.receive()[0].sequence != MARK + number:
                    pass
            worker.follow_sequence()
    worker.close()
    stranger.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
def test_random_messages_change_nothing(tmp_path, count):
    with servers_of_run(tmp_path, workers=2) as run:
        (process,), reference = run.processes, Table(SETTINGS)
        first, second = run.client(0), run.client(1)
        tables = [client.open_table("name", SETTINGS) for client in (first, second)]
        generator = np.random.default_rng(0)

        def step() -> None:
            slices = [draw_slice(generator) for _ in tables]
            for table, each in zip(tables, slices, strict=True):
                table.push(*each, OPTIMIZERS["momentum"])
            for client in (first, second):
                client.commit()
            push_sum(reference, slices, OPTIMIZERS["momentum"])

        step()
        assert_equal_contents(tables[0].contents(), reference.contents())
        second._close_connections()
        send_random(process.address, run.token, 500, 1)
        resident = process.resident_bytes()
        try:
            send_random(process.address, run.token, count, 2)
        except AssertionError:
            print(process.text()[-3000:], process.process.poll())
            raise
        assert process.resident_bytes() - resident < MOST_GROWTH
        assert_equal_contents(tables[0].contents(), reference.contents())
        second = run.client(1, incarnation=3)
        tables[1] = second.open_table("name", SETTINGS)
        for _ in range(3):
            step()
        assert_equal_contents(tables[1].contents(), reference.contents())
        first.close()
        second.close()
        assert process.end() == 0
        refused = re.findall(r"'[^']*': (\d+)", process.text().splitlines()[-1])
        assert sum(map(int, refused)) > 0.8 * count
