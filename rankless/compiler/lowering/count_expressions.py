"""Steps of a local program that compute sizes from counts of selected rows, and check counts."""

from collections.abc import Callable, Sequence
from typing import Any

from rankless.compiler.tracing.symbolic_sizes import EXPRESSION_GLOBALS
from rankless.errors import CaptureError


class SizeFromCounts:
    """Called with counts, returns a size that depends on them.

    Args:
        expression: The size as Python, in the names of the counts.
        names: These names.
    """

    __name__ = "size_from_counts"

    def __init__(self, expression: str, names: Sequence[str]) -> None:
        code = f"lambda {', '.join(names)}: {expression}"
        self._compute: Callable[..., Any] = eval(code, dict(EXPRESSION_GLOBALS))

    def __call__(self, *counts: int) -> Any:
        """Return the size."""
        return self._compute(*counts)


class CountCheck:
    """Called with counts of selected rows that the job combines, raises `CaptureError` if they do not fit.

    Args:
        expression: The condition as Python, in the names of the counts.
        names: These names.
        line: The script's line.
    """

    __name__ = "count_check"

    def __init__(self, expression: str, names: Sequence[str], line: str) -> None:
        self._holds = SizeFromCounts(expression, names)
        self._line = line

    def __call__(self, *counts: int) -> None:
        """Check the counts."""
        if not self._holds(*counts):
            raise CaptureError(
                expected="selected rows that are combined to be as many as each other, or as the rows of other values",
                found=f"selections of {' and '.join(map(str, counts))} rows",
                fix="select both with the same mask",
                where=self._line or None,
            )
