"""Which worker of a save needs rows by ids.

Note [rows of a save]: each worker asks its objects for their state, and in the layout "whole" the first one writes
what it has of it. Rows may be far away, on servers, which would send all of them to each worker. So objects leave them
out where another worker saves them.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_ARE_LEFT_OUT: ContextVar[bool] = ContextVar("are_left_out", default=False)


@contextlib.contextmanager
def leave_out_rows(*, applies: bool) -> Iterator[None]:
    """Within the context, `state_dict()` may leave out rows by ids: another worker saves them.

    Args:
        applies: Whether it does so.
    """
    token = _ARE_LEFT_OUT.set(applies)
    try:
        yield
    finally:
        _ARE_LEFT_OUT.reset(token)


def are_rows_left_out() -> bool:
    """Return whether another worker saves rows by ids."""
    return _ARE_LEFT_OUT.get()
