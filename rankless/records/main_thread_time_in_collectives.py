"""How long the main thread of this process has been in collectives, in which it waits for slower ranks."""

import threading
import time


class CollectiveTime:
    """Counts the time that the main thread spends within the context.

    Example:
        >>> counted = CollectiveTime()
        >>> with counted:
        ...     pass
        >>> counted.nanoseconds > 0
        True
    """

    def __init__(self) -> None:
        self.nanoseconds = 0
        """All of it so far."""
        self._began_at = 0
        self._depth = 0

    def __enter__(self) -> None:
        """Begin to count."""
        if threading.get_ident() == threading.main_thread().ident:
            self._depth += 1
            if self._depth == 1:
                self._began_at = time.monotonic_ns()

    def __exit__(self, *_error: object) -> None:
        """Count what has passed."""
        if threading.get_ident() == threading.main_thread().ident:
            self._depth -= 1
            if self._depth == 0:
                self.nanoseconds += time.monotonic_ns() - self._began_at


COLLECTIVE_TIME = CollectiveTime()
"""That of this process."""
