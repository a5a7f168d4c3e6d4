"""Gradients of rows, and their sum over lookups and workers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankless.parameter_server.tables.distinct_ids import find_distinct, sum_rows
from rankless.parameter_server.tables.settings import TableSettings


@dataclass(frozen=True)
class RowGradients:
    """Gradients of different ids.

    Args:
        ids: The ids, int64, of shape (n,).
        occurrences: How often each occurred, int64, of shape (n,).
        gradients: The sum of each id's gradients, of shape (n, dim).
    """

    ids: NDArray[np.int64]
    occurrences: NDArray[np.int64]
    gradients: NDArray[np.floating]


def no_gradients(settings: TableSettings) -> RowGradients:
    """Return gradients of no ids of a table."""
    none = np.empty(0, np.int64)
    return RowGradients(none, none, np.empty((0, settings.dim), settings.dtype))


def sum_gradients(parts: Sequence[RowGradients]) -> RowGradients:
    """Return the sum of gradients by ids, added in the order of the parts."""
    if len(parts) == 1:
        return parts[0]
    ids, places, _ = find_distinct(np.concatenate([part.ids for part in parts]))
    occurrences = np.zeros(len(ids), np.int64)
    np.add.at(occurrences, places, np.concatenate([part.occurrences for part in parts]))
    return RowGradients(
        ids, occurrences, sum_rows(np.concatenate([part.gradients for part in parts]), places, len(ids))
    )
