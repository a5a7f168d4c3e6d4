"""The lookups of a table in captured programs; see Note [lookups in a program] in `table_operators`."""

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from rankless.extensions.servers.table_operators import register_source, table_rows
from rankless.extensions.servers.table_training import TableTraining


class CapturedLookups:
    """Reads rows for programs, and takes their gradients. A program has the number of this object, while it lives."""

    def __init__(self, find_training: Callable[[], TableTraining]) -> None:
        """Register the table of one module.

        Args:
            find_training: A method of the module. It returns the table in training, whose weight and rows the script
                may have replaced. The module stays free to go.
        """
        self._find_training = weakref.WeakMethod(find_training)
        self._number = register_source(self)

    def look_up(self, weight: Tensor, ids: Tensor, dim: int) -> Tensor:
        """Return the rows of ids, with `dim` elements, as an operator of the program that is being captured."""
        rows: Tensor = table_rows(weight, ids, self._number, dim)
        return rows

    def read_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, on a CPU."""
        return self._training().look_up_now(ids)

    def request_rows(self, ids: Sequence[Tensor]) -> bool:
        """Ask for rows that the next program will read. Return whether that has been of use so far."""
        return self._training().request_rows(ids)

    def add_gradients(self, ids: Tensor, gradients: Tensor) -> Tensor:
        """Take the gradients of rows for the next step. Return the dense gradient of the weight."""
        return self._training().add_of_program(ids, gradients)

    def _training(self) -> TableTraining:
        find_training = self._find_training()
        assert find_training is not None, "a program has outlived the table of its lookups"
        return find_training()
