"""`rankless --help` against a Python that does nothing; `extra_seconds` is to be 0.15 at most."""

import sys
from collections.abc import Iterator

from bench.commands import BIN, seconds_to_end
from bench.pairs import Row, measure, row


def rows() -> Iterator[Row]:
    """One row, whose ratio has no aim: the extra seconds have."""
    ours = [str(BIN / "rankless"), "--help"]
    peer = [sys.executable, "-c", "pass"]
    times = measure(lambda: seconds_to_end(ours), lambda: seconds_to_end(peer), pairs=11)
    yield row("help", peer="python -c pass", times=times)
