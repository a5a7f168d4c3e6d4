"""What a table holds, as arrays that can be stored, and its numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STATE_COUNTS = {
    "": 0,
    "SGD": 0,
    "SGD with momentum": 1,
    "Adagrad": 1,
    "SparseAdam": 2,
    "Adam": 2,
    "Adam with amsgrad": 3,
    "FTRL": 2,
}
"""By the name of an optimizer, how many states a row has, each as long as its values. `row_optimizers` needs numba to
say it."""


@dataclass(frozen=True, kw_only=True)
class TableContents:
    """Everything that a table holds, in the order of ids.

    Args:
        step: Number of steps so far.
        optimizer: Name of the optimizer whose states the rows have. Empty: none yet.
        optimizer_steps: Number of its steps.
        initial_state: What the states of a new row hold.
        ids: Ids that have a row, int64, of shape (n,).
        rows: Values and optimizer states, of shape (n, dim * (1 + states)).
        used_steps: The last step that used each row, int64, of shape (n,).
        waiting_ids: Ids without a row whose occurrences are counted, int64, of shape (m,).
        waiting_occurrences: Their occurrences, int64, of shape (m,).
        waiting_steps: The last step that had each, int64, of shape (m,).
    """

    step: int
    optimizer: str
    optimizer_steps: int
    initial_state: float
    ids: NDArray[np.int64]
    rows: NDArray[np.floating]
    used_steps: NDArray[np.int64]
    waiting_ids: NDArray[np.int64]
    waiting_occurrences: NDArray[np.int64]
    waiting_steps: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TableStatistics:
    """Numbers of a table.

    Args:
        rows: Rows now.
        waiting: Ids without a row whose occurrences are counted.
        created: Rows created so far.
        expired: Rows removed because no step used them.
        evicted: Rows removed because the table was full.
        rejected: Gradients left out, because their id had no row.
        memory_bytes: Bytes of all rows that have ever been used, and of all slots of the maps.
        largest_shard_rows: Rows of the virtual shard that has most.
    """

    rows: int
    waiting: int
    created: int
    expired: int
    evicted: int
    rejected: int
    memory_bytes: int
    largest_shard_rows: int


@dataclass(frozen=True, kw_only=True)
class TableState:
    """All of a table but its arrays, and where those are: what another process needs to continue with the same memory.

    Args:
        step: Number of steps so far.
        optimizer: Name of the optimizer whose states the rows have. Empty: none yet.
        optimizer_steps: Number of its steps.
        initial_state: What the states of a new row hold.
        width: Elements of a row with its states.
        most_rows: Rows that there are addresses for.
        most_slots: Slots of one shard that there are addresses for.
        history_steps: Number of steps that rows with momentum catch up with.
        history_first_moving: The first of them since which buffers count.
        history_length: Elements of the arrays of those steps. 0: there are none.
        positions: Where the arrays are in the memory, by their names.
    """

    step: int
    optimizer: str
    optimizer_steps: int
    initial_state: float
    width: int
    most_rows: int
    most_slots: int
    history_steps: int
    history_first_moving: int
    history_length: int
    positions: Mapping[str, int]
