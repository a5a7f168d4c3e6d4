"""Requests for rows of a table: those that wait for answers, and those that are sent before anybody needs the rows."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.parameter_server.servers.routing import RoutedIds
from rankless.parameter_server.servers.server_connection import ServerAnswer
from rankless.parameter_server.servers.server_requests import ServerRequests
from rankless.parameter_server.servers.worker_transaction import SentNumber, WorkerTransaction


class PendingPull(NamedTuple):
    """Requests for rows, whose answers are missing.

    Args:
        routed: The ids, by server.
        requests: The server and the number of each request.
        ranges: The first and the last id of each, in the order by server.
    """

    routed: RoutedIds
    requests: list[SentNumber]
    ranges: list[tuple[int, int]]


class EarlyServedPull:
    """Rows after the last transaction of a worker, asked for early; see Note [early rows]."""

    def __init__(
        self,
        requests: ServerRequests,
        transaction: WorkerTransaction,
        pending: PendingPull,
        take_pull: Callable[[PendingPull, Sequence[ServerAnswer]], NDArray[np.floating]],
    ) -> None:
        """Note requests that have been sent.

        Args:
            requests: By which they were sent.
            transaction: The worker's.
            pending: The requests.
            take_pull: Returns the rows that servers have answered.
        """
        self._requests, self._pending, self._take_pull = requests, pending, take_pull
        self._transaction, self._committed = transaction, transaction.committed
        requests.note_early(pending.requests)

    def take(self) -> NDArray[np.floating] | None:
        """Return the rows, if no transaction has followed, and no worker was lost. Otherwise abandon them."""
        if self._committed != self._transaction.committed:
            self.abandon()
            return None
        numbers = self._pending.requests
        answers = self._requests.read(
            lambda: self._requests.answers(numbers) if self._requests.claim_early(numbers) else None
        )
        return None if answers is None else self._take_pull(self._pending, answers)

    def abandon(self) -> None:
        """Wait for the rows no more."""
        self._requests.abandon_early(self._pending.requests)
