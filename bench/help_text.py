"""`rankless --help` against a Python that does nothing. The target is at most 0.15 extra seconds."""

import sys
from collections.abc import Iterator

from bench.commands import BIN, seconds_to_end
from bench.pairs import Row, make_row, measure


def rows() -> Iterator[Row]:
    """Yield one row. Its ratio has no target, only its extra seconds have."""
    ours = [str(BIN / "rankless"), "--help"]
    peer = [sys.executable, "-c", "pass"]
    times = measure(lambda: seconds_to_end(ours), lambda: seconds_to_end(peer), pairs=11)
    yield make_row("help", peer="python -c pass", times=times)
