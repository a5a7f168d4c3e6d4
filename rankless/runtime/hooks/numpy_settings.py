"""Applies a worker's seed to numpy when its script first imports numpy."""

import numpy
import numpy.random  # numpy imports it at its first use: here the fork server pays these 8 ms, once for all workers


def seed(number: int | None) -> None:
    """Seed numpy's global generator. With None, draw a seed, so that forks of one process differ."""
    numpy.random.seed(None if number is None else number % 2**32)
