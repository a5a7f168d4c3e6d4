"""What a worker sets in numpy when its script first imports it."""

import numpy


def seed(number: int) -> None:
    """Seed numpy's global generator."""
    numpy.random.seed(number % 2**32)
