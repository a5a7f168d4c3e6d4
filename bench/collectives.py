"""Collectives on the CPU of one host: in shared memory against Gloo, and the cost of the check before each of them."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.commands import rankless_run, run
from bench.pairs import Row, make_row

KIB, MIB = 1 << 10, 1 << 20
CHECKED_SIZES = {"4_kib": 4 * KIB, "1_mib": MIB}
CHECKED = ("all_reduce", "all_gather_single")
CASES: dict[int, tuple[tuple[str, int, str, float | None], ...]] = {
    2: (
        ("all_reduce", 4 * KIB, "gloo", 0.15),
        ("all_reduce", MIB, "gloo", None),
        ("all_reduce", 25 * MIB, "gloo", 1 / 4.5),
        ("all_reduce", 100 * MIB, "gloo", None),
        ("all_reduce_allocated", 25 * MIB, "gloo", 1 / 8),
        ("all_reduce_allocated", 100 * MIB, "gloo", None),
        ("all_gather_single", MIB, "gloo", None),
        ("broadcast", MIB, "gloo", None),
        # The machine's own speed of copying and adding as much.
        ("all_reduce", 25 * MIB, "bound", 1 / 0.85),
    ),
    4: tuple(("all_reduce", size, "gloo", None) for size in (4 * KIB, MIB, 25 * MIB, 100 * MIB)),
    8: tuple(("all_reduce", size, "gloo", None) for size in (4 * KIB, MIB, 25 * MIB, 100 * MIB)),
}
"""By workers: collective, bytes of each rank, peer, and the largest acceptable ratio."""
PAIRS = {2: 15, 4: 9, 8: 7}
"""More workers than cores take long, and a run must end within minutes."""


def rows() -> Iterator[Row]:
    """Yield one row per collective, size and peer."""
    for workers in CASES:
        yield from _compare(workers)
    for operation in CHECKED:
        for name, byte_count in CHECKED_SIZES.items():
            times = _measure_times(rankless_run(2, "collectives.py", operation, str(byte_count), backend="gloo"))
            yield make_row(f"{operation}_{name}", peer="torch.distributed", times=times, aim=1.05)


def _compare(workers: int) -> Iterator[Row]:
    """Measure all cases of so many workers in one run, because starting it takes longer than most of them."""
    words = []
    for operation, byte_count, peer, _ in CASES[workers]:
        calls = max(1, min(100, 16 * MIB // byte_count) * 2 // workers)
        words.append(f"{operation},{byte_count},{peer},{calls}")
    script = ("shared_memory_collectives.py", *words, "--pairs", str(PAIRS[workers]))
    measured = _measure_times(rankless_run(workers, *script))
    for (operation, byte_count, peer, aim), times in zip(CASES[workers], measured, strict=True):
        size = f"{byte_count // MIB} MiB" if byte_count >= MIB else f"{byte_count // KIB} KiB"
        yield make_row(f"{operation} {size} {workers} workers", peer=peer, times=times, aim=aim)


def _measure_times(command: list[str]) -> Any:
    """Return what the workers have written: pairs of seconds, or a list of them for each case."""
    with tempfile.TemporaryDirectory() as folder:
        run(command, threads=1, folder=folder)
        return json.loads((Path(folder) / "times.json").read_text())
