"""Gradients of rows, and their sum over lookups and workers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.tables.compiled_functions import compiled
from rankless.extensions.servers.tables.id_map import find_distinct
from rankless.extensions.servers.tables.settings import TableSettings

GradientArrays = tuple[NDArray[np.int64], NDArray[np.floating]]
"""Occurrences, of shape (n,), and gradients, of shape (n, dim)."""


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


def count_bytes(gradients: RowGradients) -> int:
    """Return the memory of gradients."""
    return gradients.ids.nbytes + gradients.occurrences.nbytes + gradients.gradients.nbytes


def no_gradients(settings: TableSettings) -> RowGradients:
    """Return gradients of no ids of a table."""
    none = np.empty(0, np.int64)
    return RowGradients(none, none, np.empty((0, settings.dim), settings.dtype))


def multiply_gradients(part: RowGradients, factor: float) -> RowGradients:
    """Return gradients times a factor. With 0 they are zero, also those that are not finite."""
    if factor == 1.0:
        return part
    if not factor:
        return replace(part, gradients=np.zeros_like(part.gradients))
    return replace(part, gradients=part.gradients * part.gradients.dtype.type(factor))


@compiled
def _add(added: GradientArrays, places: NDArray[np.int64], totals: GradientArrays) -> None:
    """Add occurrences and gradients of shape (n, dim) to the totals at their places."""
    for number in range(places.shape[0]):
        place = places[number]
        totals[0][place] += added[0][number]
        total = totals[1][place]
        for column in range(added[1].shape[1]):
            total[column] += added[1][number, column]


def sum_gradients(parts: Sequence[RowGradients]) -> RowGradients:
    """Return the sum of gradients by ids, added in the order of the parts. Ids are in the order of their first ones."""
    ids = parts[0].ids if len(parts) == 1 else np.concatenate([part.ids for part in parts])
    distinct, places, _ = find_distinct(ids)
    if len(parts) == 1 and len(distinct) == len(ids):
        return parts[0]
    first = parts[0].gradients
    occurrences = np.zeros(len(distinct), np.int64)
    gradients = np.zeros((len(distinct), first.shape[1]), first.dtype)
    start = 0
    for part in parts:
        stop = start + len(part.ids)
        _add((part.occurrences, part.gradients), places[start:stop], (occurrences, gradients))
        start = stop
    return RowGradients(distinct, occurrences, gradients)
