"""What a server publishes about itself for `rankless status`, in memory that its agent shares.

Counting takes a few microseconds for each request, and 2 ns for each id. Publishing happens between requests, four
times a second at most.
"""

import heapq
import mmap
import os
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.service.served_tables import OpenTable, ServerTables, row_bytes_of
from rankless.extensions.servers.service.steps.transactions import PendingTransactions
from rankless.extensions.servers.service.table_requests import TableRequests
from rankless.extensions.servers.service.wire.joint_messages import decode_joint_pull, split_slices
from rankless.extensions.servers.service.wire.messages import PREPARED, Kind, MessageHeader, array_of
from rankless.extensions.servers.tables.compiled_functions import compiled
from rankless.extensions.servers.tables.id_map import mix, shard_of
from rankless.records.encoding import encode_json
from rankless.records.server_traffic_counters import SERVER_PAGE_BYTES, ServerActivity, ShardActivity, TableActivity
from rankless.records.shared_record import RecordWriter

PUBLISH_SECONDS = 0.25
_IDLE_POLL_MILLISECONDS = 1000
_MOST_TABLES = 32
_MOST_SHARDS = 3
_MOST_REASONS = 20
_NAME_CHARACTERS = 200


class RequestCounter:
    """Counts the requests that a server has done, the rows and bytes that moved, and the ids by shard."""

    def __init__(self) -> None:
        self.requests = 0
        self.pulled_rows = 0
        self.pulled_bytes = 0
        self.pushed_rows = 0
        self.pushed_bytes = 0
        self._table_ids: Counter[int] = Counter()
        """By number of the table: how many of its ids were requested."""
        self._shard_ids: dict[int, NDArray[np.int64]] = {}
        """By number of the table: how many ids were requested in each of its shards on this server."""

    def count(
        self, header: MessageHeader, payload: Sequence[memoryview], answer: MessageHeader, tables: ServerTables
    ) -> None:
        """Count a request that is done; one that has failed does not count.

        Args:
            header: The request's.
            payload: The request's frames, which have been checked.
            answer: The answer's header.
            tables: The tables of the server.
        """
        if answer.kind != Kind.DONE:
            return
        self.requests += 1
        match header.kind:
            case Kind.PULL:
                self._count_pull(tables.find(header.table), header.table, array_of(payload[0], "<i8", (header.rows,)))
            case Kind.PULL_SEVERAL:
                for part in decode_joint_pull(payload, header.rows):
                    self._count_pull(tables.find(part.table), part.table, part.ids)
            case Kind.PUSH_SEVERAL | Kind.PREPARE_SEVERAL:
                self._count_pushed(header)
                for message, frames in split_slices(
                    payload, header.rows, lambda table: row_bytes_of(tables.find(table))
                ):
                    ids = array_of(frames[0], "<i8", (message.rows,))
                    self._count_ids(tables.find(message.table), message.table, ids)
            case Kind.PUSH | Kind.PREPARE if not header.flags & PREPARED:
                ids = array_of(payload[1 if header.kind == Kind.PUSH else 0], "<i8", (header.rows,))
                self._count_pushed(header)
                self._count_ids(tables.find(header.table), header.table, ids)

    def _count_pushed(self, header: MessageHeader) -> None:
        self.pushed_rows += header.rows
        self.pushed_bytes += header.payload_bytes

    def _count_pull(self, opened: OpenTable, table: int, ids: NDArray[np.int64]) -> None:
        self.pulled_rows += len(ids)
        self.pulled_bytes += len(ids) * row_bytes_of(opened)
        self._count_ids(opened, table, ids)

    def _count_ids(self, opened: OpenTable, table: int, ids: NDArray[np.int64]) -> None:
        first, stop = opened.shards
        counts = self._shard_ids.get(table)
        if counts is None:
            counts = self._shard_ids[table] = np.zeros(max(1, stop - first), np.int64)
        self._table_ids[table] += len(ids)
        if len(ids):
            count_shards(ids, opened.table.settings.shard_bits, first, counts)

    def requested_ids(self, table: int) -> int:
        """Return how many ids of a table were requested."""
        return self._table_ids[table]

    def hottest_shards(self, table: int, opened: OpenTable) -> list[ShardActivity]:
        """Return the shards of a table with the most requested ids, those with most first."""
        counts = self._shard_ids.get(table)
        if counts is None:
            return []
        shown = min(_MOST_SHARDS, len(counts))
        most = [int(shard) for shard in np.argpartition(counts, -shown)[-shown:]]
        most.sort(key=lambda shard: (-counts[shard], shard))
        return [
            ShardActivity(shard=opened.shards[0] + shard, requested_ids=int(counts[shard]))
            for shard in most
            if counts[shard]
        ]


@compiled
def count_shards(ids: NDArray[np.int64], shard_bits: int, first: int, counts: NDArray[np.int64]) -> None:
    """Add the ids of each shard to `counts`, which begins with the shard `first`. All ids belong to these shards."""
    for number in range(ids.shape[0]):
        counts[shard_of(mix(ids[number]), shard_bits) - first] += 1


class ServerStatusPage:
    """The page in which a server publishes what it does.

    Args:
        descriptor: The page, of `SERVER_PAGE_BYTES`; None to publish nothing.
        requests: The server's tables and transactions.
        counter: What it has counted.
        refused: Messages that it has refused, by reason.
    """

    def __init__(
        self, descriptor: int | None, requests: TableRequests, counter: RequestCounter, refused: Counter[str]
    ) -> None:
        self._requests, self._counter, self._refused = requests, counter, refused
        self._writer = None
        if descriptor is not None:
            self._writer = RecordWriter(memoryview(mmap.mmap(descriptor, SERVER_PAGE_BYTES)))
        self._published_at = float("-inf")
        self._is_current = False

    @property
    def poll_milliseconds(self) -> int:
        """How long the server may wait for a message before it calls `publish` again."""
        return _IDLE_POLL_MILLISECONDS if self._is_current else round(PUBLISH_SECONDS * 1e3)

    def publish(self, *, is_idle: bool) -> None:
        """Publish what the server has done, unless it did so a moment ago.

        Args:
            is_idle: Whether the server has received nothing since the last call.
        """
        now = time.monotonic()
        if self._writer is None or (is_idle and self._is_current):
            self._is_current = True
            return
        self._is_current = False
        if now - self._published_at < PUBLISH_SECONDS:
            return
        self._writer.write(encode_activity(self._measure(now), most_bytes=self._writer.capacity))
        self._published_at, self._is_current = now, True

    def _measure(self, now: float) -> ServerActivity:
        counter, transactions, tables = self._counter, self._requests.transactions, self._requests.tables.tables
        shown = heapq.nlargest(_MOST_TABLES, range(len(tables)), key=counter.requested_ids)
        return ServerActivity(
            process_id=os.getpid(),
            monotonic=now,
            transactions=transactions.number,
            requests=counter.requests,
            pulled_rows=counter.pulled_rows,
            pulled_bytes=counter.pulled_bytes,
            pushed_rows=counter.pushed_rows,
            pushed_bytes=counter.pushed_bytes,
            refused=_most_frequent(self._refused),
            transactions_ahead=tuple(_count_ahead(transactions)),
            table_count=len(tables),
            tables=tuple(_measure_table(counter, number, tables[number]) for number in shown),
        )


def encode_activity(activity: ServerActivity, *, most_bytes: int) -> bytes:
    """Return the record as JSON, with as many tables as fit."""
    data = encode_json(activity)
    while len(data) > most_bytes and activity.tables:
        activity = msgspec.structs.replace(activity, tables=activity.tables[: len(activity.tables) // 2])
        data = encode_json(activity)
    return data if len(data) <= most_bytes else b""


def _count_ahead(transactions: PendingTransactions) -> list[int]:
    """Return how many transactions each worker is ahead of the last common one, or of the slowest worker's last one.

    A worker that has left is ahead of nothing.
    """
    own, left = transactions.list_committed(), transactions.left
    last = transactions.number
    if own:
        last = min((count for worker, count in enumerate(own) if worker not in left), default=0)
    return [0 if worker in left else max(0, ready - last) for worker, ready in enumerate(transactions.ready)]


def _measure_table(counter: RequestCounter, number: int, opened: OpenTable) -> TableActivity:
    statistics = opened.table.statistics()
    return TableActivity(
        name=opened.name[:_NAME_CHARACTERS],
        rows=statistics.rows,
        memory_bytes=statistics.memory_bytes,
        requested_ids=counter.requested_ids(number),
        shards=opened.shards[1] - opened.shards[0],
        hottest_shards=tuple(counter.hottest_shards(number, opened)),
    )


def _most_frequent(refused: Counter[str]) -> dict[str, int]:
    shown = {reason[:_NAME_CHARACTERS]: count for reason, count in refused.most_common(_MOST_REASONS)}
    others = refused.total() - sum(shown.values())
    return shown | ({"other reasons": others} if others > 0 else {})
