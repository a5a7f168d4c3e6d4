"""A table that every worker has whole: each makes the same steps, with the gradients of all."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rankless.errors import TableError
from rankless.extensions.servers.tables.contents import TableContents, TableStatistics
from rankless.extensions.servers.tables.optimizers import OptimizerSettings
from rankless.extensions.servers.tables.row_gradients import RowGradients, sum_gradients
from rankless.extensions.servers.tables.table import Table

Gather = Callable[[bytes], Sequence[bytes]]
"""Returns the bytes of all workers in their order, to all of them."""


class ReplicatedTable:
    """One worker's copy of a table. Steps are collective: they sum the gradients of all workers, in their order.

    Example:
        >>> table = ReplicatedTable(Table(TableSettings(dim=4)), gather=lambda data: [data])
        >>> table.push(np.array([7]), np.ones(1, np.int64), np.ones((1, 4), np.float32), SgdSettings(lr=0.1))
    """

    def __init__(self, table: Table, gather: Gather) -> None:
        """Take over a table, which must be equal on all workers. Collective.

        Args:
            table: The table, with the same settings and steps everywhere.
            gather: Exchanges bytes with the other workers.

        Raises:
            TableError: The workers' tables have different settings, or have made different steps.
        """
        self.settings = table.settings
        self._table = table
        self._gather = gather
        described = [data.decode() for data in gather(f"{table.settings!r} after {table.step} steps".encode())]
        if different := [other for other in described if other != described[0]]:
            raise TableError(
                expected=f"the same table on all workers; on the first one it is {described[0]}",
                found=f"{different[0]} on worker {described.index(different[0])}",
                fix="make the table with the same arguments on all workers, and with seed=",
            )

    @property
    def step(self) -> int:
        """How many steps there have been."""
        return self._table.step

    def pull(self, ids: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the values of ids, of shape (n, dim). Not collective."""
        return self._table.pull(ids)

    def push(
        self,
        ids: NDArray[np.int64],
        occurrences: NDArray[np.int64],
        gradients: NDArray[np.floating],
        settings: OptimizerSettings,
    ) -> None:
        """Make one step with the gradients of all workers. Arguments are this worker's, as those of `Table.push`."""
        own = b"".join(np.ascontiguousarray(part).tobytes() for part in (ids, occurrences, gradients))
        total = sum_gradients([unpack_gradients(part, gradients) for part in self._gather(own)])
        self._table.push(total.ids, total.occurrences, total.gradients, settings)

    def reset_states(self) -> None:
        """Forget the optimizer."""
        self._table.reset_states()

    def contents(self) -> TableContents:
        """Return a copy of everything that the table holds. Not collective."""
        return self._table.contents()

    def restore(self, contents: TableContents) -> None:
        """Take contents, which must be the same on all workers."""
        self._table.restore(contents)

    def statistics(self) -> TableStatistics:
        """Return numbers of rows and of what has happened to them. Not collective."""
        return self._table.statistics()


def unpack_gradients(data: bytes | bytearray, like: NDArray[np.floating]) -> RowGradients:
    """Return gradients of rows from the bytes of their ids, occurrences and gradients, which have the dim of others."""
    data = bytearray(data)  # functions would be compiled once more for arrays that cannot be written
    number_bytes, row_bytes = np.dtype(np.int64).itemsize, like.shape[1] * like.itemsize
    count = len(data) // (2 * number_bytes + row_bytes)
    return RowGradients(
        np.frombuffer(data, np.int64, count),
        np.frombuffer(data, np.int64, count, count * number_bytes),
        np.frombuffer(data, like.dtype, count * like.shape[1], 2 * count * number_bytes).reshape(count, like.shape[1]),
    )
