"""The different ids of lookups, also of those that a worker expects; see Note [early rows]."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.tables.distinct_ids import find_distinct
from rankless.extensions.servers.tables.row_store import EarlyPull, EarlyRowStore, RowStore

MOST_MISSES = 8
"""After so many predictions in a row without use there are no more."""
_MOST_SEARCHES = 16


class IdSearch(NamedTuple):
    """The different ids of one lookup.

    Args:
        ids: The ids, int64, of shape (n,).
        distinct: The different ones, of shape (m,).
        places: The number of each id among them, of shape (n,).
        occurrences: How often each occurs, of shape (m,).
    """

    ids: NDArray[np.int64]
    distinct: NDArray[np.int64]
    places: NDArray[np.int64]
    occurrences: NDArray[np.int64]


def search_ids(ids: NDArray[np.int64]) -> IdSearch:
    """Return the different ids of a lookup."""
    return IdSearch(ids, *find_distinct(ids))


class ExpectedLookup(NamedTuple):
    """A lookup whose rows have been asked for, from a store."""

    search: IdSearch
    store: RowStore
    pull: EarlyPull


class LookupSearches:
    """Searches for different ids, each of which is made once: early, for a lookup, or for its gradients."""

    def __init__(self) -> None:
        self._known: deque[IdSearch] = deque(maxlen=_MOST_SEARCHES)
        self._expected: list[ExpectedLookup] = []
        self._misses = 0

    def request(self, store: RowStore, lookups: Iterable[NDArray[np.int64]]) -> bool:
        """Ask a store for the rows of lookups that are expected, without waiting.

        Returns:
            Whether predictions have been of use. If not, nothing is asked for.
        """
        self._misses = self._misses + 1 if self._expected else 0
        self.forget_expected()
        if self._misses >= MOST_MISSES or not isinstance(store, EarlyRowStore):
            return False
        for ids in lookups:
            search = search_ids(ids)
            self._expected.append(ExpectedLookup(search, store, store.request_early(search.distinct)))
        return True

    def read(self, store: RowStore, ids: NDArray[np.int64]) -> tuple[IdSearch, NDArray[np.floating]]:
        """Return the search of a lookup, and the rows of its different ids."""
        expected = self._take_expected(ids)
        rows = None
        if expected is None:
            search = search_ids(ids)
        else:
            search = expected.search
            if expected.store is store:
                rows = expected.pull.take()
        self._known.append(search)
        return search, store.pull(search.distinct) if rows is None else rows

    def find(self, ids: NDArray[np.int64]) -> IdSearch:
        """Return the search of ids, which a lookup may have made."""
        known = next((search for search in self._known if np.array_equal(search.ids, ids)), None)
        return known or search_ids(ids)

    def forget(self) -> None:
        """Forget the searches of earlier lookups."""
        self._known.clear()

    def forget_expected(self) -> None:
        """Wait for no lookup any more."""
        for expected in self._expected:
            expected.pull.abandon()
        self._expected.clear()

    def _take_expected(self, ids: NDArray[np.int64]) -> ExpectedLookup | None:
        for place, expected in enumerate(self._expected):
            if np.array_equal(expected.search.ids, ids):
                return self._expected.pop(place)
        return None
