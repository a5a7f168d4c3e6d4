"""Detects stalled operations, which some ranks have submitted and others have not. Rank 0 warns, or ends the job."""

import sys
from collections.abc import Callable

from rankless.extensions.horovod.engine.coordinator import Coordinator

CHECK_SECONDS = 1.0


def print_to_stderr(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


class StallDetector:
    """Checks every second for stalled operations.

    Args:
        warn_seconds: Warn after this time, and again every time it has passed. 0 never warns.
        shutdown_seconds: End the job after this time. 0 never ends it.
        warn: Receives the warnings. The default prints them to standard error.
    """

    def __init__(
        self, *, warn_seconds: float, shutdown_seconds: float, warn: Callable[[str], None] = print_to_stderr
    ) -> None:
        self._warn_seconds = warn_seconds
        self._shutdown_seconds = shutdown_seconds
        self._warn = warn
        self._last_check = 0.0
        self._last_warning = 0.0

    def check(self, coordinator: Coordinator, now: float) -> str | None:
        """Warn about stalled operations. Returns the reason to end the job if they have stalled for too long."""
        if not self._warn_seconds or now - self._last_check < min(CHECK_SECONDS, self._warn_seconds):
            return None
        self._last_check = now
        if now - self._last_warning >= self._warn_seconds:
            missing = coordinator.find_missing_ranks(before=now - self._warn_seconds)
            if missing:
                self._last_warning = now
                self._warn(_format_warning(missing, self._warn_seconds))
        if self._shutdown_seconds:
            missing = coordinator.find_missing_ranks(before=now - self._shutdown_seconds)
            if missing:
                return f"Stalled for more than {self._shutdown_seconds:g} seconds.{_format_missing(missing)}"
        return None


def _format_warning(missing: dict[int, list[str]], seconds: float) -> str:
    return (
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting "
        f"for remainder of ranks for more than {seconds:g} seconds. This may indicate that different ranks are trying "
        "to submit different tensors or that only subset of ranks is submitting tensors, which will cause deadlock. "
        + _format_missing(missing)
    )


def _format_missing(missing: dict[int, list[str]]) -> str:
    lines = [f"{rank}: [{', '.join(sorted(keys))}]" for rank, keys in missing.items()]
    return "\nMissing ranks:\n" + "\n".join(lines)
