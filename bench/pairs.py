"""Interleaved pairs of measurements, and what they say together.

Note [pairs]: ours and the peer's are measured by turns, each ratio comes from two neighbours in time, and the median
of ratios is told. Noise of the machine then meets both sides, and one bad moment cannot decide.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. Times are medians in seconds; `ratio` is ours / the peer's, median over pairs."""

    name: str
    peer: str
    ratio: float
    spread: float
    """Between the first and the third quartile of the ratios."""
    runs: int
    ours_seconds: float
    peer_seconds: float
    aim: float | None
    """The largest ratio that is good enough, where there is one."""
    extra_seconds: float
    """Ours less the peer's."""


def measure(ours: Callable[[], float], peer: Callable[[], float], *, pairs: int) -> list[tuple[float, float]]:
    """Seconds of both, `pairs` times, after one of each that does not count; who goes first alternates."""
    ours(), peer()
    times = []
    for number in range(pairs):
        if number % 2 == 0:
            first = ours()
            times.append((first, peer()))
        else:
            first = peer()
            times.append((ours(), first))
    return times


def row(name: str, *, peer: str, times: Sequence[tuple[float, float]], aim: float | None = None) -> Row:
    """The row of a table from pairs of seconds (ours, the peer's)."""
    ratios = [ours / theirs for ours, theirs in times]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return Row(
        name=name,
        peer=peer,
        ratio=statistics.median(ratios),
        spread=quartiles[2] - quartiles[0],
        runs=len(ratios),
        ours_seconds=statistics.median(ours for ours, _ in times),
        peer_seconds=statistics.median(theirs for _, theirs in times),
        aim=aim,
        extra_seconds=statistics.median(ours - theirs for ours, theirs in times),
    )
