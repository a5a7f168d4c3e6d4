"""A collective whose arguments have been checked, ready to run as an operation of the group's queue."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class PreparedCall(NamedTuple):
    """A collective that is ready to run."""

    run: Callable[[], None]
    """Makes the collective, and writes its results."""
    written: Sequence[Tensor]
    """The tensors that it writes."""
    outputs: list[Any]
    """The value of its work, as torch arranges it."""
