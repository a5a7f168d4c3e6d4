"""From the command to the first collective, against torchrun."""

from collections.abc import Iterator

from bench.commands import rankless_run, seconds_to_report, torchrun
from bench.pairs import Row, make_row, measure

AIMS = {2: 0.45, 4: 0.3, 8: 0.2}


def rows() -> Iterator[Row]:
    """Yield one row per number of workers."""
    for workers, aim in AIMS.items():
        ours = rankless_run(workers, "first_collective.py")
        peer = torchrun(workers, "first_collective.py")
        times = measure(lambda ours=ours: seconds_to_report(ours), lambda peer=peer: seconds_to_report(peer), pairs=5)
        yield make_row(f"start_{workers}", peer="torchrun", times=times, aim=aim)
