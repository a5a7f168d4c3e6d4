"""The sum of the slices of a step: what one device would have had as the gradients of its batch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.parameter_server.tables.compiled_functions import compiled
from rankless.parameter_server.tables.distinct_ids import find_distinct


class GradientSlice(NamedTuple):
    """The part of a step that one worker has computed.

    Args:
        ids: Ids, int64, of shape (n,).
        occurrences: How often each occurred, int64, of shape (n,).
        gradients: The sum of each id's gradients, of shape (n, dim).
    """

    ids: NDArray[np.int64]
    occurrences: NDArray[np.int64]
    gradients: NDArray[np.floating]


@compiled
def add_slice(
    occurrences: NDArray[np.int64],
    gradients: NDArray[np.floating],
    places: NDArray[np.int64],
    totals: tuple[NDArray[np.int64], NDArray[np.floating]],
) -> None:
    """Add occurrences and gradients of shape (n, dim) to the totals at their places."""
    for number in range(places.shape[0]):
        place = places[number]
        totals[0][place] += occurrences[number]
        total = totals[1][place]
        for column in range(gradients.shape[1]):
            total[column] += gradients[number, column]


def sum_slices(slices: Sequence[GradientSlice]) -> GradientSlice:
    """Return the sum of slices, added in their order. Ids are in the order of their first occurrence."""
    ids = slices[0].ids if len(slices) == 1 else np.concatenate([each.ids for each in slices])
    distinct, places, _ = find_distinct(ids)
    if len(slices) == 1 and len(distinct) == len(ids):
        return slices[0]
    first = slices[0].gradients
    occurrences = np.zeros(len(distinct), np.int64)
    gradients = np.zeros((len(distinct), first.shape[1]), first.dtype)
    start = 0
    for each in slices:
        stop = start + len(each.ids)
        add_slice(each.occurrences, each.gradients, places[start:stop], (occurrences, gradients))
        start = stop
    return GradientSlice(distinct, occurrences, gradients)
