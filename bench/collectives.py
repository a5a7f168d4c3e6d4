"""Collectives on the CPU of one host: in shared memory against Gloo, and the cost of the check before each of them."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row

KIB, MIB = 1 << 10, 1 << 20
CHECKED_SIZES = {"4_kib": 4 * KIB, "1_mib": MIB}
CHECKED = ("all_reduce", "all_gather_single")
AGAINST_GLOO = (
    ("all_reduce", 4 * KIB, 2, 0.15),
    ("all_reduce", MIB, 2, None),
    ("all_reduce", 25 * MIB, 2, 1 / 4.5),
    ("all_reduce_allocated", 25 * MIB, 2, 1 / 8),
    ("all_reduce", 4 * KIB, 4, None),
    ("all_reduce", 25 * MIB, 4, None),
    ("all_gather_single", MIB, 2, None),
    ("broadcast", MIB, 2, None),
)
"""Collective, bytes of each rank, workers, and the largest acceptable ratio."""
BYTES_OF_BOUND, LARGEST_RATIO_TO_BOUND = 25 * MIB, 1 / 0.85


def rows() -> Iterator[Row]:
    """Yield one row per collective, size and peer."""
    for operation, byte_count, workers, aim in AGAINST_GLOO:
        yield _compare(operation, byte_count, workers, peer="gloo", aim=aim)
    # The machine's own speed of copying and adding as much.
    yield _compare("all_reduce", BYTES_OF_BOUND, 2, peer="bound", aim=LARGEST_RATIO_TO_BOUND)
    for operation in CHECKED:
        for name, byte_count in CHECKED_SIZES.items():
            times = _measure_times(rankless_run(2, "collectives.py", operation, str(byte_count), backend="gloo"))
            yield make_row(f"{operation}_{name}", peer="torch.distributed", times=times, aim=1.05)


def _compare(operation: str, byte_count: int, workers: int, *, peer: str, aim: float | None) -> Row:
    calls = max(1, min(100, 16 * MIB // byte_count))
    words = (operation, str(byte_count), peer, "--calls", str(calls))
    times = _measure_times(rankless_run(workers, "shared_memory_collectives.py", *words))
    size = f"{byte_count // MIB} MiB" if byte_count >= MIB else f"{byte_count // KIB} KiB"
    return make_row(f"{operation} {size} {workers} workers", peer=peer, times=times, aim=aim)


def _measure_times(command: list[str]) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        run(command, threads=1, folder=folder)
        times: list[tuple[float, float]] = json.loads((Path(folder) / "times.json").read_text())
        return times
