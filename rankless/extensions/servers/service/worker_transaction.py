"""What a worker changes until its next commit, and how its slices of steps reach the servers.

Slices of small tables travel together, with one message to each server.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rankless.errors import TableError
from rankless.extensions.servers.service.routing import RoutedIds
from rankless.extensions.servers.service.server_requests import SentNumber, ServerRequests
from rankless.extensions.servers.service.wire.joint_messages import JointSlice, SliceMessage, encode_slices
from rankless.extensions.servers.service.wire.messages import (
    FOR_TRAINING,
    JOINT_BYTES,
    MOST_MESSAGE_BYTES,
    PREPARED,
    Kind,
    MessageHeader,
)
from rankless.extensions.servers.service.wire.prepared_pushes import PreparedPush
from rankless.extensions.servers.tables.row_gradients import RowGradients
from rankless.extensions.servers.tables.settings import TableSettings

_MOST_JOINT_BYTES = 64 << 20
"""Gradients of one message with several slices."""
_SEVERAL = {Kind.PUSH: Kind.PUSH_SEVERAL, Kind.PREPARE: Kind.PREPARE_SEVERAL}


class SlicedTable(Protocol):
    """A table on servers, to which slices are sent."""

    settings: TableSettings

    def route(self, ids: NDArray[np.int64]) -> RoutedIds:
        """Return ids by server."""
        ...

    def number_on(self, server: int) -> int:
        """Return the number that a server has for the table."""
        ...


class TableSlice(NamedTuple):
    """Gradients of rows of one table.

    Args:
        table: The table.
        gradients: The gradients.
        text: What the message says of them, as JSON: in a push the optimizer's settings. Empty: nothing.
    """

    table: SlicedTable
    gradients: RowGradients
    text: bytes = b""

    def require_sendable(self) -> None:
        """Raise TableError if the slice is too large for a message."""
        settings, gradients, ids = self.table.settings, self.gradients.gradients, self.gradients.ids
        assert gradients.shape == (len(ids), settings.dim)
        assert gradients.dtype == settings.dtype
        if gradients.nbytes + 2 * ids.nbytes + len(self.text) > MOST_MESSAGE_BYTES:
            raise TableError(
                expected=f"a slice of a step of at most {MOST_MESSAGE_BYTES:,} bytes",
                found=f"{gradients.nbytes:,} bytes of gradients",
                fix="make smaller batches",
            )

    def describe(self, server: int, rows: int) -> SliceMessage:
        """Return what a message to a server says of its part, of some rows."""
        return SliceMessage(self.table.number_on(server), rows, self.text.decode())

    def divide(self, server_count: int) -> list[RowGradients]:
        """Return each server's part."""
        routed = self.table.route(self.gradients.ids)
        occurrences, gradients = self.gradients.occurrences, self.gradients.gradients
        if server_count > 1:
            occurrences, gradients = occurrences[routed.places], gradients[routed.places]
        occurrences, gradients = np.ascontiguousarray(occurrences, np.int64), np.ascontiguousarray(gradients)
        ends = routed.ends.tolist()
        return [
            RowGradients(routed.ids[start:stop], occurrences[start:stop], gradients[start:stop])
            for start, stop in itertools.pairwise(ends)
        ]


def send_slices(
    requests: ServerRequests, kind: Kind, slices: Sequence[TableSlice], transaction: int
) -> list[SentNumber]:
    """Send slices in their order, within an exchange. Each server gets a part of each, perhaps without rows.

    Args:
        requests: The connections to the servers.
        kind: `PUSH` or `PREPARE`.
        slices: The slices. `require_sendable` holds for each.
        transaction: The transaction to which they belong.

    Returns:
        The requests, whose answers must be awaited.
    """
    sent: list[SentNumber] = []
    for group in _list_groups(slices):
        if len(group) == 1:
            sent += send_slice(requests, MessageHeader(kind, transaction=transaction), group[0])
        else:
            sent += _send_together(requests, MessageHeader(_SEVERAL[kind], transaction=transaction), group)
    return sent


def send_slice(requests: ServerRequests, header: MessageHeader, part: TableSlice) -> list[SentNumber]:
    """Send each server its part of one slice, within an exchange."""
    sent = []
    texts = (part.text,) if part.text else ()
    for server, own in enumerate(part.divide(len(requests.connections))):
        own_header = header._replace(table=part.table.number_on(server), rows=len(own.ids))
        sent.append(requests.send(server, own_header, (*texts, own.ids, own.occurrences, own.gradients)))
    return sent


def _send_together(requests: ServerRequests, header: MessageHeader, slices: Sequence[TableSlice]) -> list[SentNumber]:
    count = len(requests.connections)
    divided = [each.divide(count) for each in slices]
    sent = []
    for server in range(count):
        parts = [
            JointSlice(each.describe(server, len(own[server].ids)), own[server])
            for each, own in zip(slices, divided, strict=True)
        ]
        rows = sum(part.message.rows for part in parts)
        sent.append(requests.send(server, header._replace(rows=rows), encode_slices(parts)))
    return sent


def _list_groups(slices: Sequence[TableSlice]) -> Iterator[list[TableSlice]]:
    """Yield slices that go with one message, without a change of their order, which all workers have alike."""
    group: list[TableSlice] = []
    group_bytes = 0
    for each in slices:
        own_bytes = each.gradients.gradients.nbytes
        if group and (own_bytes > JOINT_BYTES or group_bytes + own_bytes > _MOST_JOINT_BYTES):
            yield group
            group, group_bytes = [], 0
        group.append(each)
        group_bytes += own_bytes
        if own_bytes > JOINT_BYTES:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group


class WorkerTransaction:
    """The transaction to which a worker's changes belong, and what it has committed."""

    def __init__(self, committed: int, *, defers: bool) -> None:
        self.committed = committed
        """The last transaction that this worker has committed."""
        self.defers = defers
        """Whether the next transaction awaits the answers to this one's requests, so that the worker continues."""
        self.changes = 0
        """Number of changes in the next one so far."""
        self.prepared: list[PreparedPush] = []
        """The last pushes of it, which its end brings to the servers."""
        self.waiting: list[TableSlice] = []
        """Pushes of it that have not been sent, if the transaction defers."""
        self.unanswered: list[SentNumber] = []
        """Requests of it whose answers nobody has awaited."""
        self.deferred: list[SentNumber] = []
        """Those of the last transaction, whose answers the next `commit` awaits."""
        self.is_training = False
        """Whether rows are read for a training step, which must not be too far ahead of other workers' steps."""

    @property
    def pull_flags(self) -> int:
        """The flags of requests for rows."""
        return FOR_TRAINING if self.is_training else 0

    def end(self, ends: list[SentNumber], *, has_prepared: bool) -> list[SentNumber]:
        """Note requests that end the transaction. Return those whose answers must be awaited before the next one."""
        earlier, own = self.deferred, self.unanswered
        self.unanswered = []
        if self.defers:
            self.deferred = [*own, *ends]
            return earlier
        self.deferred = ends if has_prepared else []
        return [*earlier, *own] if has_prepared else [*earlier, *own, *ends]

    def take_unanswered(self) -> list[SentNumber]:
        """Return all requests whose answers nobody has awaited."""
        found = [*self.deferred, *self.unanswered]
        self.deferred, self.unanswered = [], []
        return found

    def send_waiting(self, requests: ServerRequests) -> None:
        """Send pushes that have not been sent within an exchange, but for prepared ones."""
        slices, self.waiting = self.waiting, []
        self.unanswered += send_slices(requests, Kind.PUSH, slices, self.committed + 1)

    def send_all(self, requests: ServerRequests) -> None:
        """Send all pushes that have not been sent within an exchange, because another change follows them."""
        self.send_waiting(requests)
        earlier, self.prepared = self.prepared, []
        for push in earlier:
            payload = (push.settings, np.array([push.factor], "<f8"))
            for server, table in enumerate(push.numbers):
                header = MessageHeader(Kind.PUSH, flags=PREPARED, table=table, transaction=self.committed + 1)
                self.unanswered.append(requests.send(server, header, payload))
