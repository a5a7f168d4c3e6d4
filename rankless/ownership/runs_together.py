"""What workers compute together of divided states, outside of jobs."""

from collections.abc import Callable
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class RunTogether(Protocol):
    """Makes what workers compute together outside of jobs, again if one of them is lost."""

    def __call__(self, attempt: Callable[[], Result], *, is_in_step: bool = False) -> Result:
        """Return what `attempt` returns, which changes nothing that lasts.

        Args:
            attempt: Computes it.
            is_in_step: Whether it is a part of a step, whose gradients all workers have.
        """
        ...


def run_directly(attempt: Callable[[], Result], *, is_in_step: bool = False) -> Result:  # noqa: ARG001
    """Return what workers compute together, where none may be lost."""
    return attempt()
