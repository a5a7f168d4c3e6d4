"""What a server does for each kind of request about tables, and what it keeps of each worker for the next request."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from rankless.errors import RanklessError, TableError
from rankless.extensions.servers.config import ServerMode
from rankless.extensions.servers.service.contents_transfer import (
    ContentsMetadata,
    ContentsSnapshot,
    IncomingContents,
    check_contents,
)
from rankless.extensions.servers.service.served_tables import (
    OpenTable,
    ServerTables,
    gradients_of,
    require_own_ids,
    require_sendable,
    row_bytes_of,
)
from rankless.extensions.servers.service.steps.independent_transactions import IndependentTransactions
from rankless.extensions.servers.service.steps.transactions import MOST_AHEAD, CommonTransactions, PendingTransactions
from rankless.extensions.servers.service.steps.worker_changes import LostWorkerChange, WorkerChange
from rankless.extensions.servers.service.wire.joint_messages import decode_joint_pull, encode_rows, split_slices
from rankless.extensions.servers.service.wire.messages import (
    FOR_TRAINING,
    MOST_IN_FLIGHT,
    MOST_MESSAGE_BYTES,
    PREPARED,
    Frame,
    Kind,
    LostChangeMessage,
    LostWorkersMessage,
    MessageHeader,
    MessageRefusedError,
    array_of,
    decode_json,
    encode_error,
)
from rankless.extensions.servers.service.wire.prepared_pushes import PreparedPushMessage
from rankless.extensions.servers.service.wire.setting_formats import decode_optimizer
from rankless.extensions.servers.tables.row_gradients import RowGradients


class RequestAnswer(NamedTuple):
    """The answer to one request: a header, and payload frames."""

    header: MessageHeader
    payload: tuple[Frame, ...] = ()


class WorkerSession:
    """One incarnation of a worker, and its connection."""

    def __init__(self, *, worker: int, incarnation: int, instance: int, number: int, identity: bytes) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.instance = instance
        self.number = number
        self.identity = identity
        self.last_sequence = 0
        self.answers: dict[int, RequestAnswer] = {}
        """By number of the request, those that the worker has not acknowledged."""
        self.snapshots: dict[int, ContentsSnapshot] = {}
        """By number of the table, what the worker is reading."""
        self.incoming: dict[int, IncomingContents] = {}
        """By number of the table, what the worker is restoring."""
        self._acknowledged = 0

    def reconnect(self, number: int, identity: bytes) -> None:
        """Go on over another connection."""
        self.number, self.identity = number, identity

    def is_next(self, header: MessageHeader) -> bool:
        """Return whether a request is the next one. Otherwise it is an earlier one, or numbers are missing.

        Raises:
            MessageRefusedError: It acknowledges answers that cannot have arrived, or too many requests are in flight.
        """
        next_sequence = self.last_sequence + 1
        if header.sequence != next_sequence:
            return False
        if not self._acknowledged <= header.acknowledged < next_sequence:
            raise MessageRefusedError("an acknowledgement of other answers than those sent")
        if next_sequence - header.acknowledged > MOST_IN_FLIGHT:
            raise MessageRefusedError("too many requests in flight")
        for sequence in range(self._acknowledged + 1, header.acknowledged + 1):
            self.answers.pop(sequence, None)
        self._acknowledged = header.acknowledged
        return True

    def is_answered_later(self, sequence: int) -> bool:
        """Return whether an earlier request waits for other workers."""
        return self._acknowledged < sequence <= self.last_sequence and sequence not in self.answers


_READ_KINDS = (Kind.PULL, Kind.PULL_SEVERAL, Kind.CONTENTS, Kind.RESTORE_END, Kind.STATISTICS, Kind.LEAVE)
"""They see what the worker has committed, and wait for the other workers' part of it. A worker leaves no earlier,
because it keeps its part for a server that is killed before."""
_PULL_KINDS = (Kind.PULL, Kind.PULL_SEVERAL)
_CHANGE_KINDS = (Kind.PUSH, Kind.PUSH_SEVERAL, Kind.RESET, Kind.PREPARE, Kind.PREPARE_SEVERAL)
_SEVERAL_KINDS = (Kind.PULL_SEVERAL, Kind.PUSH_SEVERAL, Kind.PREPARE_SEVERAL)
_WITHOUT_TABLE = (Kind.OPEN, Kind.READY, Kind.LEAVE, Kind.REGROUP, *_SEVERAL_KINDS)
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
        """Do requests to tables; see `extensions.servers.config` for the mode and the staleness."""
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
            Kind.PUSH_SEVERAL: self._push_several,
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
            Kind.PREPARE_SEVERAL: self._prepare_several,
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
            return self._add(request, [self._make_prepared_change(request, header.table, text, factor)])
        text, gradients = bytes(_frames(request, 4)[0]), gradients_of(opened, header.rows, request.payload[1:])
        return self._add(request, [WorkerChange(header.table, _describe_push(opened.name, text), text, gradients)])

    def _push_several(self, request: WorkerRequest) -> RequestAnswer:
        changes = [
            WorkerChange(table, _describe_push(self.tables.find(table).name, text), text, gradients)
            for table, text, gradients in self._slices_of(request)
        ]
        return self._add(request, changes)

    def _slices_of(self, request: WorkerRequest) -> Iterator[tuple[int, bytes, RowGradients]]:
        """Yield the table, the optimizer's settings and the gradients of each slice of a request with several."""
        slices = split_slices(request.payload, request.header.rows, lambda table: row_bytes_of(self.tables.find(table)))
        for message, frames in slices:
            gradients = gradients_of(self.tables.find(message.table), message.rows, frames)
            yield message.table, message.settings.encode(), gradients

    def _make_prepared_change(self, request: WorkerRequest, table: int, text: bytes, factor: float) -> WorkerChange:
        """Return a push of gradients that the worker has prepared."""
        opened = self.tables.find(table)
        gradients = self.transactions.find_prepared(request.session.worker, request.header.transaction, table, factor)
        return WorkerChange(table, _describe_push(opened.name, text), text, gradients, factor=factor)

    def _prepare(self, request: WorkerRequest) -> RequestAnswer:
        opened, header = self.tables.find(request.header.table), request.header
        return self._keep_slices(request, [(header.table, gradients_of(opened, header.rows, _frames(request, 3)))])

    def _prepare_several(self, request: WorkerRequest) -> RequestAnswer:
        return self._keep_slices(request, [(table, gradients) for table, _, gradients in self._slices_of(request)])

    def _keep_slices(self, request: WorkerRequest, slices: Sequence[tuple[int, RowGradients]]) -> RequestAnswer:
        try:
            for table, gradients in slices:
                self.transactions.prepare(request.session.worker, request.header.transaction, table, gradients)
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
            message.worker, message.number, gradients_of(opened, header.rows, request.payload[1:])
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
        return self._add(request, [WorkerChange(request.header.table, what, b"", None, request.header.start)])

    def _add(self, request: WorkerRequest, changes: Sequence[WorkerChange]) -> RequestAnswer:
        try:
            for change in changes:
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
            self._add(request, changes)
        self.transactions.mark_ready(request.session.worker, request.header.transaction)
        return _done(request)

    def _pull(self, request: WorkerRequest) -> RequestAnswer:
        opened, count = self.tables.find(request.header.table), request.header.rows
        ids = require_own_ids(opened, array_of(_frames(request, 1)[0], "<i8", (count,)))
        require_sendable([(opened, count)])
        return _done(request, opened)._replace(payload=(opened.table.pull(ids),))

    def _pull_several(self, request: WorkerRequest) -> RequestAnswer:
        parts = decode_joint_pull(_frames(request, 2), request.header.rows)
        opened = [self.tables.find(part.table) for part in parts]
        require_sendable([(each, len(part.ids)) for each, part in zip(opened, parts, strict=True)])
        ids = [require_own_ids(each, part.ids) for each, part in zip(opened, parts, strict=True)]
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


@functools.lru_cache(1024)
def _describe_push(table: str, text: bytes) -> str:
    return f"push to the table {table!r} with {decode_optimizer(text)}"


def _frames(request: WorkerRequest, count: int) -> Sequence[memoryview]:
    if len(request.payload) != count:
        raise MessageRefusedError("a wrong number of payload frames")
    return request.payload
