"""The interface to rows, wherever they are: in this process, in every worker, or on servers."""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.tables.contents import TableContents, TableStatistics
from rankless.extensions.servers.tables.optimizers import OptimizerSettings
from rankless.extensions.servers.tables.settings import TableSettings


class RowStore(Protocol):
    """Holds and steps rows. `Table` has them in this process, and its methods describe these."""

    settings: TableSettings

    @property
    def step(self) -> int:
        """How many steps there have been."""
        ...

    def pull(self, ids: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the values of ids, of shape (n, dim)."""
        ...

    def push(
        self,
        ids: NDArray[np.int64],
        occurrences: NDArray[np.int64],
        gradients: NDArray[np.floating],
        settings: OptimizerSettings,
    ) -> None:
        """Make one step with this worker's part of the gradients. All workers call it, each with its part."""
        ...

    def reset_states(self) -> None:
        """Forget the optimizer. All workers call it."""
        ...

    def contents(self) -> TableContents:
        """Return everything that the store holds."""
        ...

    def restore(self, contents: TableContents) -> None:
        """Take contents instead of what the store holds."""
        ...

    def statistics(self) -> TableStatistics:
        """Return numbers of rows and of what has happened to them."""
        ...


class PreparedRowStore(RowStore, Protocol):
    """A store that can get a worker's gradients before the step."""

    def push_prepared(self, settings: OptimizerSettings, factor: float) -> None:
        """Make one step with the gradients that this worker has prepared, times a factor. All workers call it."""
        ...


class EarlyPull(Protocol):
    """Rows that a worker has asked for before it needs them."""

    def take(self) -> NDArray[np.floating] | None:
        """Return what `pull` would return now, if this is it. None: something may have changed. Called once."""
        ...

    def abandon(self) -> None:
        """Wait for the rows no more."""
        ...


@runtime_checkable
class EarlyRowStore(RowStore, Protocol):
    """A store that can be asked for rows before they are needed."""

    def request_early(self, ids: NDArray[np.int64]) -> EarlyPull:
        """Ask for the rows of ids after the last step, together with those of other tables, without waiting.

        Args:
            ids: As for `pull`. They must not change.
        """
        ...
