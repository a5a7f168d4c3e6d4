"""Measure two calls in alternating blocks in the same workers, so that both see the same load of the machine."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist


def write_times(ours: Callable[[], object], peer: Callable[[], object], *, pairs: int, calls: int, warmup: int) -> None:
    """Write the result of `measure_calls` to times.json on rank 0."""
    times = measure_calls(ours, peer, pairs=pairs, calls=calls, warmup=warmup)
    if dist.get_rank() == 0:
        Path("times.json").write_text(json.dumps(times))


def measure_calls(
    ours: Callable[[], object], peer: Callable[[], object], *, pairs: int, calls: int, warmup: int
) -> list[tuple[float, float]]:
    """Return the seconds of one call of each side, a pair for each block.

    Args:
        ours: Rankless's side.
        peer: The other side.
        pairs: The number of blocks of each side. The sides take turns in being first.
        calls: The number of calls in a block.
        warmup: The number of calls of each side before.
    """
    time_calls(ours, warmup), time_calls(peer, warmup)
    times = []
    for number in range(pairs):
        if number % 2 == 0:
            first = time_calls(ours, calls)
            times.append((first, time_calls(peer, calls)))
        else:
            first = time_calls(peer, calls)
            times.append((time_calls(ours, calls), first))
    return times


def time_calls(call: Callable[[], object], calls: int) -> float:
    """Return the seconds of one call, on average. All workers begin together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls
