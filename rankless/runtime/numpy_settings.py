"""What a worker sets in numpy when its script first imports it."""

import numpy
import numpy.random  # numpy itself imports it at its first use only: 8 ms for the parent instead of for every worker


def seed(number: int) -> None:
    """Seed numpy's global generator."""
    numpy.random.seed(number % 2**32)
