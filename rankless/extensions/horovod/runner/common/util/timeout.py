"""A time limit for the start of a job."""

import time


class TimeoutException(Exception):
    """The time is over."""


class Timeout:
    """A time limit that begins now.

    Args:
        timeout: The time in seconds.
        message: What `check_time_out_for` raises. It contains `{activity}`.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._message = message
        self._timeout_at = time.time() + timeout

    def remaining(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self._timeout_at - time.time())

    def timed_out_at(self) -> float:
        """Return when the time is over, in seconds since 1970."""
        return self._timeout_at

    def timed_out(self) -> bool:
        """Return whether the time is over."""
        return time.time() > self._timeout_at

    def check_time_out_for(self, activity: str) -> None:
        """Raise TimeoutException if the time is over."""
        if self.timed_out():
            raise TimeoutException(
                self._message.format(activity=activity) + f" Timeout after {self._timeout:g} seconds."
            )
