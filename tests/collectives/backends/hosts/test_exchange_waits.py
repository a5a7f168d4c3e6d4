"""Waits for exchanges between hosts, which look at the group again and again."""

from datetime import timedelta

import pytest

from rankless.collectives.backends.hosts.gloo_exchange import ExchangeTimeout, GlooExchange


class Work:
    """An operation that ends during a slice, after which Gloo says that the slice is over."""

    def __init__(self, *, ends: bool = True, failure: str = "") -> None:
        self._ends = ends
        self._failure = failure
        self._is_completed = False

    def is_completed(self) -> bool:
        return self._is_completed

    def wait(self, limit: timedelta | None = None) -> None:
        if limit is not None:
            self._is_completed = self._ends
            raise RuntimeError("Operation timed out!")
        if self._failure:
            raise RuntimeError(self._failure)


def wait(work: Work, seconds: float = 5.0) -> None:
    GlooExchange.wait(object.__new__(GlooExchange), work, seconds, lambda: None)


def test_an_operation_that_ends_just_after_its_slice_is_done():
    wait(Work())


def test_its_failure_is_raised():
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        wait(Work(failure="connection closed by peer"))


def test_one_that_never_ends_is_late():
    with pytest.raises(ExchangeTimeout):
        wait(Work(ends=False), seconds=0.0)
