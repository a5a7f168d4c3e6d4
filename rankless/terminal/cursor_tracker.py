"""Follows where a script's output leaves the cursor of a terminal that the agent writes to as well."""

import os
import re
import time
from collections.abc import Callable
from typing import TextIO

QUIET_SECONDS = 1.0
"""How long after a script has last drawn in place the agent keeps off the terminal: its bars may not be complete."""

_DRAWS = re.compile(rb"\r(?!\n|\Z)|\x08|\x1b\[[\d;]*[A-HJKSTfsu]|\x1b[78M]")
"""A carriage return that ends no line, a backspace, and the sequences that move the cursor or erase."""
_COLOURS = re.compile(rb"(?:\x1b\[[\d;]*m)*\Z")
_TAIL_BYTES = 32
"""More than the longest of these sequences, which may arrive in two parts."""


class CursorTracker:
    """Knows whether a script has left the cursor inside a line, and whether it draws bars, as tqdm and rich do."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tail = b""
        self._drawn_at = float("-inf")

    def feed(self, data: bytes) -> None:
        """Take note of bytes that were written to the terminal."""
        text = self._tail + data
        if _DRAWS.search(text, max(0, len(self._tail) - _TAIL_BYTES)):
            self._drawn_at = self._clock()
        self._tail = text[-_TAIL_BYTES:]

    @property
    def is_inside_line(self) -> bool:
        """Whether the last line has no end yet."""
        shown = self._tail[: _COLOURS.search(self._tail).start()]  # type: ignore[union-attr]  # it matches everything
        return bool(shown) and not shown.endswith(b"\n")

    @property
    def is_free(self) -> bool:
        """Whether the agent may draw: the cursor is at the start of a line, and the script draws nothing."""
        return not self.is_inside_line and self._clock() - self._drawn_at >= QUIET_SECONDS


def share_terminal(out: TextIO, err: TextIO) -> bool:
    """Return whether two streams end in the same terminal, file or pipe."""
    try:
        return os.path.samestat(os.fstat(out.fileno()), os.fstat(err.fileno()))
    except (OSError, ValueError, AttributeError):  # a stream in memory
        return False
