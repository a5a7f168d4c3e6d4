"""What a server does for each kind of request about tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankless.config.servers import ServerMode
from rankless.errors import RanklessError, TableError
from rankless.parameter_server.servers.contents_transfer import (
    ContentsMetadata,
    ContentsSnapshot,
    IncomingContents,
    check_contents,
)
from rankless.parameter_server.servers.routing import are_ids_of_shards
from rankless.parameter_server.servers.served_tables import OpenTable, ServerTables
from rankless.parameter_server.servers.sessions import RequestAnswer, WorkerSession
from rankless.parameter_server.servers.steps.independent_transactions import IndependentTransactions
from rankless.parameter_server.servers.steps.transactions import MOST_AHEAD, CommonTransactions, PendingTransactions
from rankless.parameter_server.servers.steps.worker_changes import LostWorkerChange, WorkerChange
from rankless.parameter_server.servers.wire.error_messages import encode_error
from rankless.parameter_server.servers.wire.joint_pulls import decode_joint_pull, encode_rows
from rankless.parameter_server.servers.wire.lost_worker_messages import LostChangeMessage, LostWorkersMessage
from rankless.parameter_server.servers.wire.messages import (
    FOR_TRAINING,
    MOST_MESSAGE_BYTES,
    PREPARED,
    Kind,
    MessageHeader,
    MessageRefusedError,
    array_of,
    decode_json,
)
from rankless.parameter_server.servers.wire.prepared_pushes import PreparedPushMessage
from rankless.parameter_server.servers.wire.setting_formats import decode_optimizer
from rankless.parameter_server.tables.row_gradients import RowGradients

_MOST_OCCURRENCES = 1 << 32
"""Of one id in one slice, so that sums over workers do not overflow."""
_READ_KINDS = (Kind.PULL, Kind.PULL_SEVERAL, Kind.CONTENTS, Kind.RESTORE_END, Kind.STATISTICS, Kind.LEAVE)
"""They see what the worker has committed, and wait for the other workers' part of it. A worker leaves no earlier,
because it keeps its part for a server that is killed before."""
_PULL_KINDS = (Kind.PULL, Kind.PULL_SEVERAL)
_CHANGE_KINDS = (Kind.PUSH, Kind.RESET, Kind.PREPARE)
_WITHOUT_TABLE = (Kind.OPEN, Kind.READY, Kind.LEAVE, Kind.REGROUP, Kind.PULL_SEVERAL)
_MOST_WIDTH = 1 << 24
_MOST_CHANGES = 1 << 20
"""Of one worker in one transaction, for another worker that is lost."""


class WorkerRequest(NamedTuple):
    """A request of a worker, in its order."""

    session: WorkerSession
    header: MessageHeader
    payload: Sequence[memoryview]


class TableRequests:
    """Does requests, and commits transactions when they are complete."""

    def __init__(self, tables: ServerTables, worker_count: int, mode: ServerMode, staleness: int) -> None:
        """Do requests to tables; see `config.servers` for the mode and the staleness."""
        self.tables = tables
        self.transactions = make_transactions(tables, worker_count, mode)
        self._most_ahead = staleness if mode == "bounded" else None
        self.failure: RanklessError | None = None
        """Why no transaction can be committed any more."""
        self._snapshots: dict[int, ContentsSnapshot] = {}
        """By table, the contents since the last change. Workers ask for the same ones to save them."""
        self._actions: Mapping[int, Callable[[WorkerRequest], RequestAnswer]] = {
            Kind.OPEN: self._open,
            Kind.PUSH: self._push,
            Kind.RESET: self._reset,
            Kind.READY: self._ready,
            Kind.PULL: self._pull,
            Kind.PULL_SEVERAL: self._pull_several,
            Kind.CONTENTS: self._contents,
            Kind.CONTENTS_PART: self._contents_part,
            Kind.RESTORE: self._restore,
            Kind.RESTORE_PART: self._restore_part,
            Kind.RESTORE_END: self._restore_end,
            Kind.STATISTICS: self._statistics,
            Kind.LEAVE: self._leave,
            Kind.PREPARE: self._prepare,
            Kind.REGROUP: self._regroup,
            Kind.PUSH_FOR_LOST: self._push_for_lost,
        }

    def begin_incarnation(self, worker: int) -> None:
        """Forget what a worker has begun, as it has started anew."""
        self.transactions.begin_incarnation(worker)
        self.tables.keep_left(self.transactions.left)

    def must_wait(self, request: WorkerRequest) -> bool:
        """Return whether other workers must commit before a request can be done."""
        header = request.header
        if self.failure is not None:
            return False
        committed = self.transactions.committed_of(request.session.worker)
        if header.kind in _READ_KINDS:
            return header.transaction > committed or self._is_too_early(header)
        return header.kind in _CHANGE_KINDS and header.transaction > committed + MOST_AHEAD

    def _is_too_early(self, header: MessageHeader) -> bool:
        """Return whether a training worker is ahead of the slowest one by more than the staleness that is allowed."""
        transactions, most_ahead = self.transactions, self._most_ahead
        if most_ahead is None or header.kind not in _PULL_KINDS or not header.flags & FOR_TRAINING:
            return False
        assert isinstance(transactions, IndependentTransactions)
        return header.transaction - transactions.slowest > most_ahead

    def check(self, request: WorkerRequest) -> None:
        """Raise MessageRefusedError for a request that is not understood. Nothing has changed then."""
        header = request.header
        if header.kind not in self._actions:
            raise MessageRefusedError("an unknown kind")
        if self.failure is not None:  # which answers it
            return
        if header.kind not in _WITHOUT_TABLE:
            self.tables.find(header.table)
        # A read of a later transaction than the worker's last one would wait for ever.
        ready = self.transactions.ready[request.session.worker]
        if header.kind in _READ_KINDS and header.transaction > ready:
            raise MessageRefusedError("a read of a transaction that the worker has not completed")
        if header.kind in (*_CHANGE_KINDS, Kind.READY) and header.transaction != ready + 1:
            raise MessageRefusedError("a change of another transaction than the worker's next one")

    def answer(self, request: WorkerRequest) -> RequestAnswer:
        """Do a request. Raises MessageRefusedError for one that is not understood."""
        try:
            if self.failure is not None and request.header.kind != Kind.LEAVE:
                raise self.failure
            return self._actions[request.header.kind](request)
        except TableError as error:
            return failed(request.header, error)
        except MessageRefusedError:
            raise
        except Exception as error:  # for example MemoryError
            return failed(request.header, _unforeseen(error))

    def commit(self) -> bool:
        """Commit the next transaction, if it is complete. Return whether waiting requests may be done now."""
        if self.failure is not None:
            return False
        try:
            changes = self.transactions.take()
            if changes is None:
                return False
            self._snapshots.clear()
            self.tables.apply(changes, self.transactions.number, self.transactions.list_committed())
        except TableError as error:
            self.failure = error
        except Exception as error:
            self.failure = _unforeseen(error)
        return True

    def _open(self, request: WorkerRequest) -> RequestAnswer:
        frames = _frames(request, 2)
        try:
            name = str(frames[0], "utf-8")
        except UnicodeDecodeError:
            raise MessageRefusedError("a name that is not text") from None
        number = self.tables.open(name, bytes(frames[1]), request.session.worker)
        answer = _done(request, self.tables.find(number))
        return answer._replace(header=answer.header._replace(table=number))

    def _push(self, request: WorkerRequest) -> RequestAnswer:
        opened, header = self.tables.find(request.header.table), request.header
        if header.flags & PREPARED:
            text, (factor,) = bytes(_frames(request, 2)[0]), array_of(request.payload[1], "<f8", (1,)).tolist()
            return self._add(request, self._make_prepared_change(request, header.table, text, factor))
        text, gradients = bytes(_frames(request, 4)[0]), _gradients_of(opened, header.rows, request.payload[1:])
        return self._add(request, WorkerChange(header.table, _describe_push(opened, text), text, gradients))

    def _make_prepared_change(self, request: WorkerRequest, table: int, text: bytes, factor: float) -> WorkerChange:
        """Return a push of gradients that the worker has prepared."""
        opened = self.tables.find(table)
        gradients = self.transactions.find_prepared(request.session.worker, request.header.transaction, table, factor)
        return WorkerChange(table, _describe_push(opened, text), text, gradients, factor=factor)

    def _prepare(self, request: WorkerRequest) -> RequestAnswer:
        opened, header = self.tables.find(request.header.table), request.header
        gradients = _gradients_of(opened, header.rows, _frames(request, 3))
        try:
            self.transactions.prepare(request.session.worker, header.transaction, header.table, gradients)
        except TableError as error:
            self.failure = error
            raise
        return _done(request)

    def _push_for_lost(self, request: WorkerRequest) -> RequestAnswer:
        opened, header = self.tables.find(request.header.table), request.header
        message = decode_json(_frames(request, 4)[0], LostChangeMessage)
        if not 0 <= message.worker < len(self.transactions.ready) or not 0 <= message.number <= _MOST_CHANGES:
            raise MessageRefusedError("a change of a worker that is none")
        change = LostWorkerChange(
            message.worker, message.number, _gradients_of(opened, header.rows, request.payload[1:])
        )
        try:
            self.transactions.add_for_lost(request.session.worker, header.transaction, change)
        except TableError as error:
            self.failure = error
            raise
        return _done(request)

    def _regroup(self, request: WorkerRequest) -> RequestAnswer:
        message = decode_json(_frames(request, 1)[0], LostWorkersMessage)
        workers = range(len(self.transactions.ready))
        if message.round < self.tables.kept.round or not set(message.lost) <= set(workers):
            raise MessageRefusedError("lost workers of an earlier round, or that are none")
        self.transactions.regroup(request.session.worker, message.lost, request.header.transaction)
        self.tables.keep_lost(self.transactions.lost, message.round)
        return _done(request)

    def _reset(self, request: WorkerRequest) -> RequestAnswer:
        _frames(request, 0)
        what = f"reset of the states of the table {self.tables.find(request.header.table).name!r}"
        return self._add(request, WorkerChange(request.header.table, what, b"", None, request.header.start))

    def _add(self, request: WorkerRequest, change: WorkerChange) -> RequestAnswer:
        try:
            self.transactions.add(request.session.worker, request.header.transaction, change)
        except TableError as error:
            self.failure = error
            raise
        return _done(request)

    def _ready(self, request: WorkerRequest) -> RequestAnswer:
        """End a worker's part of a transaction, perhaps after its last pushes, which come with the end."""
        if request.payload:
            frames = _frames(request, 2)
            pushes = decode_json(frames[0], list[PreparedPushMessage])
            factors = array_of(frames[1], "<f8", (len(pushes),)).tolist()
            changes = [
                self._make_prepared_change(request, push.table, push.settings.encode(), factor)
                for push, factor in zip(pushes, factors, strict=True)
            ]
            for change in changes:
                self._add(request, change)
        self.transactions.mark_ready(request.session.worker, request.header.transaction)
        return _done(request)

    def _pull(self, request: WorkerRequest) -> RequestAnswer:
        opened, count = self.tables.find(request.header.table), request.header.rows
        ids = _ids_of(opened, array_of(_frames(request, 1)[0], "<i8", (count,)))
        _require_sendable([(opened, count)])
        return _done(request, opened)._replace(payload=(opened.table.pull(ids),))

    def _pull_several(self, request: WorkerRequest) -> RequestAnswer:
        parts = decode_joint_pull(_frames(request, 2), request.header.rows)
        opened = [self.tables.find(part.table) for part in parts]
        _require_sendable([(each, len(part.ids)) for each, part in zip(opened, parts, strict=True)])
        ids = [_ids_of(each, part.ids) for each, part in zip(opened, parts, strict=True)]
        rows = [each.table.pull(wanted) for each, wanted in zip(opened, ids, strict=True)]
        return _done(request)._replace(payload=encode_rows([each.table.step for each in opened], rows))

    def _contents(self, request: WorkerRequest) -> RequestAnswer:
        _frames(request, 0)
        number = request.header.table
        if number not in self._snapshots:
            self._snapshots[number] = ContentsSnapshot(self.tables.find(number).table.contents())
        snapshot = request.session.snapshots[number] = self._snapshots[number]
        return _done(request)._replace(payload=(msgspec.json.encode(snapshot.metadata()),))

    def _contents_part(self, request: WorkerRequest) -> RequestAnswer:
        _frames(request, 0)
        header = request.header
        snapshot = request.session.snapshots.get(header.table)
        if snapshot is None or header.flags > 1:
            raise MessageRefusedError("a part of contents that are not being read")
        metadata = snapshot.metadata()
        dtype = self.tables.find(header.table).table.settings.dtype
        if header.rows * metadata.row_bytes(header.flags, dtype) > MOST_MESSAGE_BYTES:
            raise MessageRefusedError("a part of contents with too many rows")
        most = metadata.waiting if header.flags else metadata.rows
        if header.start + header.rows > most:
            raise MessageRefusedError("a part of contents beyond their end")
        if header.rows == 0:  # the worker has all it wants
            del request.session.snapshots[header.table]
            self._snapshots.pop(header.table, None)  # and the others read theirs
            return _done(request)
        return _done(request)._replace(payload=snapshot.part(header.flags, header.start, header.rows))

    def _restore(self, request: WorkerRequest) -> RequestAnswer:
        opened = self.tables.find(request.header.table)
        metadata = decode_json(_frames(request, 1)[0], ContentsMetadata)
        if min(metadata.step, metadata.optimizer_steps, metadata.width - 1, metadata.rows, metadata.waiting) < 0:
            raise MessageRefusedError("contents with negative numbers")
        if metadata.width > _MOST_WIDTH:
            raise MessageRefusedError("contents with rows that are too wide")
        request.session.incoming[request.header.table] = IncomingContents(metadata, opened.table.settings.dtype)
        return _done(request)

    def _restore_part(self, request: WorkerRequest) -> RequestAnswer:
        header = request.header
        incoming = request.session.incoming.get(header.table)
        if incoming is None or header.flags > 1:
            raise MessageRefusedError("a part of contents that are not being restored")
        incoming.add(header.flags, header.start, header.rows, request.payload)
        return _done(request)

    def _restore_end(self, request: WorkerRequest) -> RequestAnswer:
        _frames(request, 0)
        opened, incoming = self.tables.find(request.header.table), request.session.incoming
        if request.header.table not in incoming:
            raise MessageRefusedError("the end of contents that are not being restored")
        contents = incoming[request.header.table].finish()
        del incoming[request.header.table]
        check_contents(contents, opened.table.settings.shard_bits, opened.shards)
        self._snapshots.clear()
        self.tables.restore(opened, contents)
        return _done(request, opened)

    def _statistics(self, request: WorkerRequest) -> RequestAnswer:
        _frames(request, 0)
        opened = self.tables.find(request.header.table)
        return _done(request, opened)._replace(payload=(msgspec.json.encode(opened.table.statistics()),))

    def _leave(self, request: WorkerRequest) -> RequestAnswer:
        _frames(request, 0)
        self.transactions.leave(request.session.worker)
        self.tables.keep_left(self.transactions.left)
        return _done(request)


def make_transactions(tables: ServerTables, worker_count: int, mode: ServerMode) -> PendingTransactions:
    """Return the transactions of a mode, after those that an earlier process of the server has kept."""
    kept = tables.kept
    if mode == "sync":
        return CommonTransactions(worker_count, tables.last_transaction, kept.left, kept.lost)
    return IndependentTransactions(worker_count, kept.committed, kept.left)


def _unforeseen(error: Exception) -> TableError:
    return TableError(
        expected="a server that does what workers ask for",
        found=f"{type(error).__name__}: {error}",
        fix="give servers more memory; if that is not the reason, report this to Rankless",
    )


def failed(header: MessageHeader, error: RanklessError) -> RequestAnswer:
    """Return the answer that a request cannot be done."""
    return RequestAnswer(MessageHeader(Kind.FAILED, sequence=header.sequence), (encode_error(error),))


def _done(request: WorkerRequest, opened: OpenTable | None = None) -> RequestAnswer:
    step = 0 if opened is None else opened.table.step
    header = request.header
    return RequestAnswer(MessageHeader(Kind.DONE, table=header.table, sequence=header.sequence, start=step))


def _require_sendable(rows: Iterable[tuple[OpenTable, int]]) -> None:
    """Raise MessageRefusedError for more rows than a message may have."""
    settings = [(opened.table.settings, count) for opened, count in rows]
    if sum(count * each.dim * np.dtype(each.dtype).itemsize for each, count in settings) > MOST_MESSAGE_BYTES:
        raise MessageRefusedError("a pull of too many rows")


def _ids_of(opened: OpenTable, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    if not are_ids_of_shards(ids, opened.table.settings.shard_bits, *opened.shards):
        raise MessageRefusedError("ids of another server")
    return ids


def _gradients_of(opened: OpenTable, rows: int, frames: Sequence[memoryview]) -> RowGradients:
    """Return gradients from the frames of their ids, occurrences and elements."""
    settings = opened.table.settings
    ids = _ids_of(opened, array_of(frames[0], "<i8", (rows,)))
    occurrences = array_of(frames[1], "<i8", (rows,))
    gradients = array_of(frames[2], settings.dtype, (rows, settings.dim))
    if rows and not 0 <= int(occurrences.min()) <= int(occurrences.max()) <= _MOST_OCCURRENCES:
        raise MessageRefusedError("occurrences out of range")
    return RowGradients(ids, occurrences, gradients)


def _describe_push(opened: OpenTable, text: bytes) -> str:
    return f"push to the table {opened.name!r} with {decode_optimizer(text)}"


def _frames(request: WorkerRequest, count: int) -> Sequence[memoryview]:
    if len(request.payload) != count:
        raise MessageRefusedError("a wrong number of payload frames")
    return request.payload
