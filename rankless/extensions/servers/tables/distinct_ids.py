"""The different ids of a batch, and sums over equal ones."""

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.tables.compiled_functions import compiled
from rankless.extensions.servers.tables.id_map import mix

_NONE = -1


@compiled
def find_distinct(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the different ids of a batch in the order of their first occurrence.

    Args:
        ids: Ids, int64, of shape (n,).

    Returns:
        The different ids, of shape (m,), the number of each id of the batch among them, of shape (n,), and how often
        each occurs, of shape (m,).
    """
    count = ids.shape[0]
    capacity = 4
    while capacity < 2 * count:
        capacity *= 2
    mask = capacity - 1
    numbers = np.full(capacity, _NONE, np.int64)
    distinct, occurrences = np.empty(count, np.int64), np.zeros(count, np.int64)
    places = np.empty(count, np.int64)
    found = 0
    for index in range(count):
        row_id = ids[index]
        position = np.int64(mix(row_id) & np.uint64(mask))
        while numbers[position] != _NONE and distinct[numbers[position]] != row_id:
            position = (position + 1) & mask
        if numbers[position] == _NONE:
            numbers[position] = found
            distinct[found] = row_id
            found += 1
        places[index] = numbers[position]
        occurrences[numbers[position]] += 1
    return distinct[:found], places, occurrences[:found]


@compiled
def sum_rows(rows: NDArray[np.floating], places: NDArray[np.int64], count: int) -> NDArray[np.floating]:
    """Return sums of rows that have the same place, added in their order.

    Args:
        rows: Rows, of shape (n, dim).
        places: The place of each row, from 0 to `count` - 1, int64, of shape (n,).
        count: Number of places.

    Returns:
        The sums, of shape (count, dim), zeros where there is no row.
    """
    sums = np.zeros((count, rows.shape[1]), rows.dtype)
    for index in range(places.shape[0]):
        row, total = rows[index], sums[places[index]]
        for column in range(row.shape[0]):
            total[column] += row[column]
    return sums
