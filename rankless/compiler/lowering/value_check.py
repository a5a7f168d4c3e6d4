"""Compare a value of a running program with the one that it was captured for.

Note [values that Python reads]: a program is captured for the values of tensors that the job's Python reads, as
conditions do. It compares each as soon as it has it, on all ranks alike, and before what was computed for that value.
If one differs, the program ends, and the call uses another one. Nothing has changed yet but the state of generators.
"""

from typing import Any

from torch import Tensor

from rankless.compiler.tracing.value_snapshots import is_equal


class OtherValueRead(Exception):
    """A program met another value than the one it was captured for."""

    def __init__(self, position: int, value: Any) -> None:
        super().__init__(f"value {position} is {value!r}")
        self.position = position
        self.value = value


class ValueCheck:
    """Called with a tensor of one element, raises `OtherValueRead` if it has another value than expected."""

    __name__ = "value_check"

    def __init__(self, position: int, expected: Any) -> None:
        self._position = position
        self._expected = expected

    def __call__(self, tensor: Tensor) -> None:
        """Compare the value of a tensor, to the last bit."""
        value = tensor.item()
        if not is_equal(value, self._expected):
            raise OtherValueRead(self._position, value)
