"""SGD with momentum, whose rows move in steps that have no gradient for them.

Note [rows that keep moving]: PyTorch adds sparse gradients to a momentum buffer that has all rows so far, and subtracts
the whole buffer in each step. A table looks at the rows of a step only. Since a row's last gradient its buffer has been
multiplied by a factor that is the same for all rows with that last step, and the row has moved by the buffer times a
number that is the same, too. So a number and a factor per step let a row catch up when something needs it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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

    def __init__(self, caught_up: NDArray[np.int64]) -> None:
        """Begin before the first step. `caught_up` are zeros, int64, of shape (most rows,)."""
        self._caught_up = caught_up
        self._movements, self._decays = np.zeros(1024), np.zeros(1024)
        self._steps = 0
        self._first_moving = 1

    def state(self) -> MomentumState:
        """Return the arrays, which the next step changes."""
        return MomentumState(self._movements, self._decays, self._caught_up, self._steps)

    def mark_caught_up(self, row_numbers: NDArray[np.int64]) -> None:
        """Take rows that hold all steps so far."""
        if self._steps == 0:  # step 0 stands for rows that have never had a gradient
            self.add_step(0.0, 0.0, nesterov=False)
        self._caught_up[row_numbers] = self._steps

    def add_step(self, learning_rate: float, momentum: float, *, nesterov: bool) -> None:
        """Let all rows move that have no gradient in this step. Rows with one hold it already."""
        moving = slice(self._first_moving, self._steps + 1)
        decays = self._decays[moving]
        decays *= momentum
        self._movements[moving] += learning_rate * (momentum * decays if nesterov else decays)
        still = decays >= NEGLIGIBLE_DECAY
        self._first_moving += int(still.argmax()) if still.any() else len(decays)
        self._steps += 1
        if self._steps == len(self._decays):
            more = np.zeros(self._steps)
            self._movements = np.concatenate((self._movements, more))
            self._decays = np.concatenate((self._decays, more))
        self._movements[self._steps], self._decays[self._steps] = 0.0, 1.0
