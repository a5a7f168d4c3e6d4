"""SGD with momentum, whose rows move in steps that have no gradient for them.

Note [rows that keep moving]: PyTorch adds sparse gradients to a momentum buffer that has all rows so far, and subtracts
the whole buffer in each step. A table looks at the rows of a step only. Since a row's last gradient its buffer has been
multiplied by a factor that is the same for all rows with that last step, and the row has moved by the buffer times a
number that is the same, too. So a number and a factor per step let a row catch up when something needs it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.tables.table_memory import TableMemory
from rankless.extensions.servers.tables.undo_log import remember

ARRAYS = ("caught_up", "movements", "decays")
"""The names of the arrays in a table's memory."""
FIRST_LENGTH = 1024
NEGLIGIBLE_DECAY = 1e-40
"""A buffer with this factor no longer changes a row, in float64 either."""


class MomentumState(NamedTuple):
    """How far rows have moved since a step, as numba takes it.

    Args:
        movements: By step, by how many momentum buffers a row has moved since it, float64.
        decays: By step, the factor of a buffer since it, float64.
        caught_up: The last step that each row holds, 0 if it has never had a gradient, int64, of shape (most rows,).
        steps: Number of steps so far.
    """

    movements: NDArray[np.float64]
    decays: NDArray[np.float64]
    caught_up: NDArray[np.int64]
    steps: int


class MomentumHistory:
    """The movements and decays since each step with momentum, 16 bytes a step."""

    def __init__(
        self, memory: TableMemory, *, steps: int = 0, first_moving: int = 1, length: int = FIRST_LENGTH
    ) -> None:
        """Begin before the first step, or continue after `steps` with the arrays of an earlier process."""
        self._memory = memory
        self._caught_up = memory.reserve("caught_up", (memory.most_rows,), np.int64)
        self._movements, self._decays = (memory.reserve(name, (length,), np.float64) for name in ARRAYS[1:])
        self.steps = steps
        self.first_moving = first_moving

    @property
    def length(self) -> int:
        """For how many steps there is memory."""
        return len(self._decays)

    def state(self) -> MomentumState:
        """Return the arrays, which the next step changes."""
        return MomentumState(self._movements, self._decays, self._caught_up, self.steps)

    def mark_caught_up(self, row_numbers: NDArray[np.int64]) -> None:
        """Take rows that hold all steps so far."""
        if self.steps == 0:  # step 0 stands for rows that have never had a gradient
            self.add_step(0.0, 0.0, nesterov=False)
        self._caught_up[row_numbers] = self.steps

    def add_step(self, learning_rate: float, momentum: float, *, nesterov: bool) -> None:
        """Let all rows move that have no gradient in this step. Rows with one hold it already."""
        moving = slice(self.first_moving, self.steps + 1)
        decays = self._decays[moving]
        if self._memory.is_logged:
            remember(self._memory.log, decays)
            remember(self._memory.log, self._movements[moving])
        decays *= momentum
        self._movements[moving] += learning_rate * (momentum * decays if nesterov else decays)
        still = decays >= NEGLIGIBLE_DECAY
        self.first_moving += int(still.argmax()) if still.any() else len(decays)
        self.steps += 1
        if self.steps == len(self._decays):
            self._movements, self._decays = (
                self._extended(*each) for each in zip(ARRAYS[1:], (self._movements, self._decays), strict=True)
            )
        self._movements[self.steps], self._decays[self.steps] = 0.0, 1.0

    def _extended(self, name: str, array: NDArray[np.float64]) -> NDArray[np.float64]:
        longer: NDArray[np.float64] = self._memory.reserve(name, (2 * len(array),), np.float64)
        longer[: len(array)] = array
        return longer
