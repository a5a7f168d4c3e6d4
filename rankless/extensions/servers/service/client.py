"""What a worker uses: connections to all servers of a run, tables, and transactions."""

import contextlib
from collections.abc import Collection, Sequence
from typing import Self

import msgspec

from rankless.errors import LostWorkerError, RanklessError, ServerError
from rankless.extensions.servers.config import ServersConfig
from rankless.extensions.servers.service.served_table import OpenedTable, ServedTable
from rankless.extensions.servers.service.server_connection import ConnectionSettings
from rankless.extensions.servers.service.server_requests import ServerRequests
from rankless.extensions.servers.service.table_pulls import EarlyPulls
from rankless.extensions.servers.service.wire.authentication import WorkerHello
from rankless.extensions.servers.service.wire.messages import Kind, LostWorkersMessage, MessageHeader
from rankless.extensions.servers.service.wire.prepared_pushes import encode_pushes
from rankless.extensions.servers.service.wire.setting_formats import encode_table_settings
from rankless.extensions.servers.service.worker_transaction import TableSlice, WorkerTransaction, send_slices
from rankless.extensions.servers.tables.row_gradients import RowGradients
from rankless.extensions.servers.tables.settings import TableSettings

CONNECT_TIMEOUT_SECONDS = 60.0


class ServerClient:
    """One worker's connections to all servers of a run. Not for several threads, nor for a forked process.

    Example:
        >>> with ServerClient(config, worker=0, worker_count=1) as client:
        ...     table = client.open_table("users", TableSettings(dim=16))
        ...     table.push(ids, occurrences, gradients, SgdSettings(lr=0.1))
        ...     client.commit()
        ...     table.pull(ids)
    """

    def __init__(
        self,
        config: ServersConfig,
        *,
        worker: int,
        worker_count: int,
        incarnation: int = 0,
        connect_timeout: float = CONNECT_TIMEOUT_SECONDS,
        settings: ConnectionSettings | None = None,
    ) -> None:
        """Connect to all servers.

        Args:
            config: Their addresses, and the run's token.
            worker: Number of this worker, from 0 on.
            worker_count: Number of workers.
            incarnation: How often this worker has started before.
            connect_timeout: Seconds in which all servers must answer.
            settings: What happens while the worker waits, and if a connection breaks. None: that is an error.

        Raises:
            ServerError: A server cannot be reached in time, or does not belong to this run.
        """
        hello = WorkerHello(
            worker=worker,
            worker_count=worker_count,
            incarnation=incarnation,
            instance=0,
            server_index=0,
            server_count=0,
        )
        settings = settings or ConnectionSettings()
        self._requests = ServerRequests(config, hello, settings)
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(self._requests.close)
            self._requests.connect(connect_timeout)
            self._transaction = WorkerTransaction(self._common_transaction(), defers=settings.defers)
            self._early = EarlyPulls(self._requests, self._transaction)
            if_it_fails.pop_all()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # a worker that fails does not leave: the others must not continue without its part
            self._close_connections()

    def open_table(self, name: str, settings: TableSettings) -> ServedTable:
        """Return the table of this name, which is made if it does not exist.

        Raises:
            TableError: Another worker has opened it with other settings, or there is no memory for it.
        """
        payload = (name.encode(), encode_table_settings(settings))
        with self._requests.exchange():
            answers = self._requests.ask_all(MessageHeader(Kind.OPEN), payload)
        numbers = [answer.header.table for answer in answers]
        opened = OpenedTable(numbers, answers[0].header.start)
        return ServedTable(self._requests, self._transaction, settings, opened, self._early)

    def prepare(self, slices: Sequence[tuple[ServedTable, RowGradients]]) -> None:
        """Send this worker's slices of the next step. All servers have them when the call returns.

        `ServedTable.push_prepared` then adds them to the transaction. A lost worker's are used, too.

        Raises:
            TableError: A slice is too large.
            ServerError: A server has died.
        """
        self._requests.finish_early()
        parts = [TableSlice(table, gradients) for table, gradients in slices]
        for part in parts:
            part.require_sendable()
        with self._requests.exchange():
            transaction = self._transaction.committed + 1
            self._requests.answers(send_slices(self._requests, Kind.PREPARE, parts, transaction))

    @property
    def committed(self) -> int:
        """The last transaction that this worker has committed."""
        return self._transaction.committed

    def regroup(self, lost: Collection[int], transaction: int, round_number: int) -> None:
        """Tell the servers that workers are lost and others continue; see Note [lost workers] in `transactions`.

        Args:
            lost: All workers that are lost.
            transaction: The last transaction that counts, of all workers that are left.
            round_number: The number of their round.

        Raises:
            ServerError: A server has died.
            LostWorkerError: This worker has changed tables outside of a step.
        """
        if self._transaction.changes and self._transaction.committed >= transaction:
            raise LostWorkerError(
                expected="tables that change in the steps of jobs only, where a worker is lost",
                found="a push or a reset since the last step, for example of optimizer.step() outside a job",
                fix="step tables in jobs, or start again from a checkpoint, with --min-workers for all workers",
            )
        self.forget_early_rows()
        payload = (msgspec.json.encode(LostWorkersMessage(sorted(lost), round_number)),)
        with self._requests.exchange():
            for connection in self._requests.connections:
                connection.forget_after(transaction)
            self._requests.ask_all(MessageHeader(Kind.REGROUP, transaction=transaction), payload)

    def forget_early_rows(self) -> None:
        """Use no rows that servers have been asked for early: something else than a step changes them."""
        self._early.forget()

    def request_early_rows(self) -> None:
        """Ask for all rows of `ServedTable.request_early` since the last call, without waiting."""
        self._early.send()

    def begin_step(self) -> None:
        """Begin a training step: in the mode `bounded` its pulls wait for workers that are too far behind."""
        self._transaction.is_training = True

    def commit(self) -> None:
        """End the step: what this worker has pushed since its last commit becomes one transaction.

        All servers have noted it when the call returns, unless it has prepared pushes, which go with its end, or the
        client defers. Then the next commit awaits the answers. It does not wait for the other workers: in the mode
        `sync` the next pull does.

        Raises:
            TableError: The servers cannot make steps any more.
            ServerError: A server has died.
        """
        header = MessageHeader(Kind.READY, transaction=self._transaction.committed + 1)
        with self._requests.exchange():
            self._transaction.send_waiting(self._requests)
            prepared, self._transaction.prepared = self._transaction.prepared, []
            ends = [
                self._requests.send(server, header, encode_pushes(prepared, server))
                for server in range(len(self._requests.connections))
            ]
            self._requests.answers(self._transaction.end(ends, has_prepared=bool(prepared)))
            self._transaction.committed += 1
            self._transaction.changes = 0
            self._transaction.is_training = False

    def finish(self) -> None:
        """Wait until all servers have noted what this worker has sent.

        Raises:
            TableError: They could not do it.
            ServerError: A server has died.
        """
        with self._requests.exchange():
            self._requests.answers(self._transaction.take_unanswered())

    def wait_until_committed(self) -> None:
        """Wait until all servers have made this worker's transactions, also those that are killed meanwhile."""
        self.finish()
        header = MessageHeader(Kind.STATISTICS, transaction=self._transaction.committed)
        if self._transaction.committed:
            self._requests.read(lambda: self._requests.ask_all(header))

    def close(self) -> None:
        """Leave the run once the last commit has been made, and close the connections. The others can continue alone.

        If the other workers do not make their part of it within half a minute, the worker does not leave.
        A worker with pushes that it has not committed only closes its connections.
        """
        if not self._closed and self._transaction.changes == 0:
            header = MessageHeader(Kind.LEAVE, transaction=self._transaction.committed)
            with contextlib.suppress(RanklessError):
                self._requests.read(lambda: self._requests.leave(header))
        self._close_connections()

    def _close_connections(self) -> None:
        if not self._closed:
            self._closed = True
            self._requests.close()

    def _common_transaction(self) -> int:
        """Return the last transaction of this worker's earlier incarnation. Raises ServerError if servers differ."""
        counts = [welcome.ready for each in self._requests.connections for welcome in each.welcomes]
        if len(set(counts)) > 1:
            raise ServerError(
                expected="all servers to have the same last transaction of this worker",
                found=f"transactions {counts}, by server",
                fix="start the run again from a checkpoint",
            )
        return counts[0]
