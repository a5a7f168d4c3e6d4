"""What a worker sets in numpy when its script first imports it."""

import numpy
import numpy.random  # numpy itself imports it at its first use only: 8 ms for the parent instead of for every worker


def seed(number: int | None) -> None:
    """Seed numpy's global generator; None: as in a process of its own, so that forks of one parent differ."""
    numpy.random.seed(None if number is None else number % 2**32)
