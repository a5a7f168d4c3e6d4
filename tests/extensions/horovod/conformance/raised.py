"""Returns the exception of a call, for the checks."""

from collections.abc import Callable
from typing import Any


def raised(kind: type[BaseException], call: Callable[[], Any]) -> str:
    """The text of what `call` raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")
