"""Batches that are read one early, if a job wants to know them."""

import pytest
import torch

from rankless.context.upcoming_batches import UpcomingBatches
from rankless.data.prefetching import look_ahead


class Reader:
    """Yields numbers as items and batches, and notes which it has read."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at = count, fails_at
        self.read: list[int] = []

    def __iter__(self):
        for number in range(self.count):
            if number == self.fails_at:
                raise ValueError(f"batch {number}")
            self.read.append(number)
            yield number, torch.tensor(number)


def wanted() -> UpcomingBatches:
    upcoming = UpcomingBatches()
    upcoming.is_wanted = True
    return upcoming


def test_nothing_is_read_early_before_a_job_wants_it():
    reader, upcoming = Reader(5), UpcomingBatches()
    batches = look_ahead(iter(reader), upcoming, most=5, read_again=None)
    assert [next(batches)[0], next(batches)[0]] == [0, 1]
    assert reader.read == [0, 1]
    upcoming.is_wanted = True
    assert next(batches)[0] == 2
    assert reader.read == [0, 1, 2, 3]
    assert [item for item, _ in batches] == [3, 4]


def test_the_batches_beyond_the_limit_are_read_when_they_are_due():
    reader = Reader(4)
    read = [(item, list(reader.read)) for item, _ in look_ahead(iter(reader), wanted(), most=3, read_again=None)]
    assert read == [(0, [0, 1]), (1, [0, 1, 2]), (2, [0, 1, 2]), (3, [0, 1, 2, 3])]


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7])
def test_all_batches_come_once_whatever_the_limit(most):
    assert [item for item, _ in look_ahead(iter(Reader(3)), wanted(), most=most, read_again=None)] == [0, 1, 2]


def test_an_error_of_a_batch_is_raised_when_it_is_due():
    batches = look_ahead(iter(Reader(5, fails_at=2)), wanted(), most=5, read_again=None)
    assert [next(batches)[0], next(batches)[0]] == [0, 1]
    with pytest.raises(ValueError, match="batch 2"):
        next(batches)


def test_a_batch_that_was_read_early_is_read_again_when_it_is_due():
    again: list[int] = []

    def read_again(item):
        again.append(item)
        return torch.tensor(100 + item)

    batches = look_ahead(iter(Reader(3)), wanted(), most=2, read_again=read_again)
    assert [int(batch) for _, batch in batches] == [0, 101, 2]
    assert again == [1]
