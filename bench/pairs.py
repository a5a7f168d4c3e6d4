"""Interleaved pairs of measurements, and their statistics.

Note [pairs]: the benchmarks measure Rankless and the peer alternately. Each ratio comes from two measurements in
succession, and the result is the median ratio. So noise of the machine affects both sides, and one outlier does not
matter.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table. Times are medians in seconds. `ratio` is the median of ours / peer over pairs."""

    name: str
    peer: str
    ratio: float
    spread: float
    """The difference between the third and the first quartile of the ratios."""
    runs: int
    ours_seconds: float
    peer_seconds: float
    aim: float | None
    """The largest acceptable ratio, or None without a target."""
    extra_seconds: float
    """The median of ours minus peer."""
    extra_aim: float | None = None
    """The largest acceptable `extra_seconds`, or None without a target."""


def measure(ours: Callable[[], float], peer: Callable[[], float], *, pairs: int) -> list[tuple[float, float]]:
    """Measure both `pairs` times, after one warm-up of each, and return the seconds. The first of a pair alternates."""
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


def make_row(
    name: str,
    *,
    peer: str,
    times: Sequence[tuple[float, float]],
    aim: float | None = None,
    extra_aim: float | None = None,
) -> Row:
    """Return the row of the table for pairs of seconds (ours, peer)."""
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
        extra_aim=extra_aim,
    )
