"""What a worker changes until its next commit."""

import numpy as np

from rankless.extensions.servers.service.server_requests import SentNumber, ServerRequests
from rankless.extensions.servers.service.table_slices import TableSlice, send_slices
from rankless.extensions.servers.service.wire.messages import FOR_TRAINING, PREPARED, Kind, MessageHeader
from rankless.extensions.servers.service.wire.prepared_pushes import PreparedPush


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
