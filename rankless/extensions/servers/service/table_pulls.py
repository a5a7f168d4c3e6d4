"""Requests for rows of tables: of one table, of several in one message, and early ones, whose rows nobody needs yet."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.service.routing import RoutedIds
from rankless.extensions.servers.service.server_connection import ServerAnswer
from rankless.extensions.servers.service.server_requests import SentNumber, ServerRequests
from rankless.extensions.servers.service.wire.joint_messages import JointPart, encode_joint_pull, split_rows
from rankless.extensions.servers.service.wire.messages import FOR_TRAINING, JOINT_BYTES, Kind, MessageHeader
from rankless.extensions.servers.service.worker_transaction import WorkerTransaction
from rankless.extensions.servers.tables.settings import TableSettings

PULL_BYTES = 64 << 20
"""Rows of one request. In smaller ones they would be copied together here, which takes longer than it gains."""


class PendingPull(NamedTuple):
    """Requests for rows of one table, whose answers are missing.

    Args:
        routed: The ids, by server.
        requests: The server and the number of each request.
        ranges: The first and the last id of each, in the order by server.
    """

    routed: RoutedIds
    requests: list[SentNumber]
    ranges: list[tuple[int, int]]


class PulledTable(Protocol):
    """A table on servers, from which rows are pulled."""

    settings: TableSettings
    requests: ServerRequests
    transaction: WorkerTransaction

    def route(self, ids: NDArray[np.int64]) -> RoutedIds:
        """Return ids by server."""
        ...

    def number_on(self, server: int) -> int:
        """Return the number that a server has for the table."""
        ...

    def send_pull(self, ids: NDArray[np.int64]) -> PendingPull:
        """Ask for rows, within an exchange."""
        ...

    def take_pull(self, pending: PendingPull, answers: Sequence[ServerAnswer]) -> NDArray[np.floating]:
        """Return the rows that servers have answered."""
        ...


class TablePull(NamedTuple):
    """The ids of a pull from one table."""

    table: PulledTable
    ids: NDArray[np.int64]

    @property
    def row_bytes(self) -> int:
        """The bytes of the rows."""
        settings = self.table.settings
        return len(self.ids) * settings.dim * np.dtype(settings.dtype).itemsize


class JointPull:
    """Rows of several tables, with one request to each server that has some of them."""

    def __init__(self, pulls: Sequence[TablePull]) -> None:
        self._pulls = pulls
        self._routed = [pull.table.route(pull.ids) for pull in pulls]
        self.requests: list[SentNumber] = []
        """The server and the number of each request that has been sent."""

    def send(self, requests: ServerRequests, transaction: int, flags: int) -> None:
        """Ask for the rows after a transaction, within an exchange."""
        for server in range(len(requests.connections)):
            parts = [JointPart(self._pulls[place].table.number_on(server), ids) for place, ids in self._parts(server)]
            if parts:
                rows = sum(len(part.ids) for part in parts)
                header = MessageHeader(Kind.PULL_SEVERAL, flags=flags, transaction=transaction, rows=rows)
                self.requests.append(requests.send(server, header, encode_joint_pull(parts)))

    def take(self, answers: Sequence[ServerAnswer]) -> list[NDArray[np.floating]]:
        """Return the rows of each table from the answers to all requests."""
        found: list[tuple[list[ServerAnswer], list[tuple[int, int]]]] = [([], []) for _ in self._pulls]
        for (server, _), answer in zip(self.requests, answers, strict=True):
            places = [place for place, _ in self._parts(server)]
            sizes = [self._row_bytes(place, server) for place in places]
            for place, (step, rows) in zip(places, split_rows(answer.payload, sizes), strict=True):
                found[place][0].append(ServerAnswer(answer.header._replace(start=step), [rows]))
                found[place][1].append(self._range(place, server))
        return [
            pull.table.take_pull(PendingPull(routed, [], ranges), answered)
            for pull, routed, (answered, ranges) in zip(self._pulls, self._routed, found, strict=True)
        ]

    def _parts(self, server: int) -> list[tuple[int, NDArray[np.int64]]]:
        """Return the number of each pull that has ids of a server, and these ids."""
        ranges = [(place, *self._range(place, server)) for place in range(len(self._pulls))]
        return [(place, self._routed[place].ids[start:stop]) for place, start, stop in ranges if stop > start]

    def _range(self, place: int, server: int) -> tuple[int, int]:
        start, stop = self._routed[place].ends[server : server + 2].tolist()
        return start, stop

    def _row_bytes(self, place: int, server: int) -> int:
        start, stop = self._range(place, server)
        settings = self._pulls[place].table.settings
        return (stop - start) * settings.dim * np.dtype(settings.dtype).itemsize


class EarlyServedPull:
    """Rows of a table after the last transaction of a worker; see Note [early rows]."""

    def __init__(self, pulls: "EarlyPulls") -> None:
        self._pulls = pulls

    def take(self) -> NDArray[np.floating] | None:
        """Return the rows, if no transaction has followed, and no worker was lost. None: they must be pulled."""
        return self._pulls.take(self)

    def abandon(self) -> None:
        """Wait for the rows no more."""
        self._pulls.abandon(self)


class EarlyPulls:
    """The rows that a worker asks servers for early, those of all tables in one request to each server."""

    def __init__(self, requests: ServerRequests, transaction: WorkerTransaction) -> None:
        self._requests, self._transaction = requests, transaction
        self._queued: list[tuple[EarlyServedPull, TablePull]] = []
        """Those that have not been sent."""
        self._sent: JointPull | None = None
        self._committed = 0
        """The transaction after which the rows are that have been asked for."""
        self._waiting: list[EarlyServedPull] = []
        """In the order of the request, those whose rows have been asked for."""
        self._wanted: set[EarlyServedPull] = set()
        """Those of them that nobody has abandoned."""
        self._rows: dict[EarlyServedPull, NDArray[np.floating]] = {}
        """Rows that have arrived, and that nobody has taken."""

    def add(self, pull: TablePull) -> EarlyServedPull:
        """Add rows to the next request. Their ids must not change."""
        early = EarlyServedPull(self)
        self._queued.append((early, pull))
        return early

    def send(self) -> None:
        """Ask for all rows that have been added, without waiting. Rows for which there is no room are left out."""
        queued, self._queued = self._queued, []
        self.forget()
        fitting, total = [], 0
        for early, pull in queued:
            if total + pull.row_bytes <= PULL_BYTES:
                fitting.append((early, pull))
                total += pull.row_bytes
        if not fitting or not self._requests.has_room:
            return
        self._sent = JointPull([pull for _, pull in fitting])
        with self._requests.exchange():
            # In the mode `bounded` they may have to wait for slower workers, as all rows for training.
            self._sent.send(self._requests, self._transaction.committed, FOR_TRAINING)
        self._requests.note_early(self._sent.requests)
        self._waiting, self._committed = [early for early, _ in fitting], self._transaction.committed
        self._wanted = set(self._waiting)

    def take(self, early: EarlyServedPull) -> NDArray[np.floating] | None:
        """Return rows once, after all have arrived; None if they were not asked for, or may have changed."""
        if self._committed != self._transaction.committed:
            self.forget()
        if self._sent is not None and early in self._wanted:
            self._receive(self._sent)
        return self._rows.pop(early, None)

    def abandon(self, early: EarlyServedPull) -> None:
        """Keep no rows for somebody who does not want them any more."""
        self._queued = [each for each in self._queued if each[0] is not early]
        self._rows.pop(early, None)
        self._wanted.discard(early)
        if not self._wanted:
            self.forget()

    def forget(self) -> None:
        """Use no rows that servers have been asked for: something else than a step may change them."""
        if self._sent is not None:
            self._requests.abandon_early(self._sent.requests)
        self._sent, self._waiting, self._rows = None, [], {}
        self._wanted.clear()

    def _receive(self, sent: JointPull) -> None:
        answers = self._requests.read(
            lambda: self._requests.answers(sent.requests) if self._requests.claim_early(sent.requests) else None
        )
        waiting, self._sent, self._waiting = self._waiting, None, []
        if answers is not None:
            received = zip(waiting, sent.take(answers), strict=True)
            self._rows = {early: rows for early, rows in received if early in self._wanted}


def pull_together(tables: Sequence[PulledTable], ids: Sequence[NDArray[np.int64]]) -> list[NDArray[np.floating]]:
    """Return the values of ids of each table. All requests are sent before the first answer is awaited.

    Few rows of several tables are one request to each server.

    Args:
        tables: At least one, all of one client.
        ids: The ids in each table, as for `ServedTable.pull`.
    """
    requests, transaction = tables[0].requests, tables[0].transaction
    pulls = [TablePull(table, np.ascontiguousarray(wanted)) for table, wanted in zip(tables, ids, strict=True)]
    small = [place for place, pull in enumerate(pulls) if pull.row_bytes <= JOINT_BYTES]
    joint = small[: max(1, PULL_BYTES // JOINT_BYTES)] if len(small) > 1 else []
    rest = [place for place in range(len(pulls)) if place not in set(joint)]

    def ask() -> tuple[JointPull, list[PendingPull], Iterator[ServerAnswer]]:
        together = JointPull([pulls[place] for place in joint])
        together.send(requests, transaction.committed, transaction.pull_flags)
        pending = [tables[place].send_pull(pulls[place].ids) for place in rest]
        sent = [*together.requests, *(number for each in pending for number in each.requests)]
        return together, pending, iter(requests.answers(sent))

    together, pending, answers = requests.read(ask)
    found = dict(zip(joint, together.take(list(itertools.islice(answers, len(together.requests)))), strict=True))
    for place, each in zip(rest, pending, strict=True):
        found[place] = tables[place].take_pull(each, list(itertools.islice(answers, len(each.requests))))
    return [found[place] for place in range(len(tables))]
