"""What a worker changes until its next commit."""

import numpy as np

from rankless.parameter_server.servers.server_requests import ServerRequests
from rankless.parameter_server.servers.wire.messages import PREPARED, Kind, MessageHeader
from rankless.parameter_server.servers.wire.prepared_pushes import PreparedPush

SentNumber = tuple[int, int]
"""The server and the number of a request."""


class WorkerTransaction:
    """The transaction to which a worker's changes belong, and what it has committed."""

    def __init__(self, committed: int) -> None:
        self.committed = committed
        """The last transaction that this worker has committed."""
        self.changes = 0
        """Number of changes in the next one so far."""
        self.prepared: list[PreparedPush] = []
        """The last pushes of it, which its end brings to the servers."""
        self.unanswered: list[SentNumber] = []
        """Requests whose answers the next `commit` awaits."""
        self.is_training = False
        """Whether rows are read for a training step, which must not be too far ahead of other workers' steps."""

    def send_prepared(self, requests: ServerRequests) -> None:
        """Send prepared pushes within an exchange, because another change follows them."""
        earlier, self.prepared = self.prepared, []
        for push in earlier:
            payload = (push.settings, np.array([push.factor], "<f8"))
            for server, table in enumerate(push.numbers):
                header = MessageHeader(Kind.PUSH, flags=PREPARED, table=table, transaction=self.committed + 1)
                self.unanswered.append(requests.send(server, header, payload))
