"""Replace functions and other attributes of libraries while a job is traced, and put the originals back."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

ABSENT = object()


@contextlib.contextmanager
def replace_attributes(*replaced: tuple[Any, str, Any]) -> Iterator[None]:
    """Within the context, attributes have other values: each a class, module or object, a name and a value."""
    before = [(owner, name, vars(owner).get(name, ABSENT)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is ABSENT:
                delattr(owner, name)  # a base class has the original
            else:
                setattr(owner, name, value)


def make_refusing_function(
    original: Callable[..., Any], is_refused: Callable[[str], bool], make_error: Callable[[FrameType], Exception]
) -> Callable[..., Any]:
    """Return a replacement for a function that raises an error if called from a file that `is_refused`."""

    @functools.wraps(original)
    def refusing_function(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if is_refused(frame.f_code.co_filename):
            raise make_error(frame)
        return original(*args, **kwargs)

    return refusing_function
