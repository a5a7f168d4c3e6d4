"""Different ids and sums over equal ones, as NumPy's `unique` and `add.at` give them."""

import numpy as np
import pytest

from rankless.extensions.servers.tables.id_map import find_distinct, sum_rows


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100, 5000])
@pytest.mark.parametrize("span", [1, 10, 10**6, 2**62])
def test_ids_are_those_of_the_batch_in_the_order_of_first_occurrence(count, span):
    ids = np.random.default_rng(count).integers(-span, span, count)
    distinct, places, occurrences = find_distinct(ids)
    np.testing.assert_array_equal(distinct[places], ids)
    expected, first, expected_occurrences = np.unique(ids, return_index=True, return_counts=True)
    order = np.argsort(first)
    np.testing.assert_array_equal(distinct, expected[order])
    np.testing.assert_array_equal(occurrences, expected_occurrences[order])


def test_ids_that_collide_stay_different():
    ids = np.array([0, -1, 2**63 - 1, -(2**63), 1, 0, -(2**63), 2**32, -(2**32)])
    distinct, places, occurrences = find_distinct(ids)
    assert distinct.tolist() == [0, -1, 2**63 - 1, -(2**63), 1, 2**32, -(2**32)]
    assert places.tolist() == [0, 1, 2, 3, 4, 0, 3, 5, 6]
    assert occurrences.tolist() == [2, 1, 1, 2, 1, 1, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_added_in_their_order(dtype):
    generator = np.random.default_rng(0)
    rows, places = generator.normal(size=(500, 3)).astype(dtype), generator.integers(0, 40, 500)
    expected = np.zeros((45, 3), dtype)
    np.add.at(expected, places, rows)
    np.testing.assert_array_equal(sum_rows(rows, places, 45), expected)
