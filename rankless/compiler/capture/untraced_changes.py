"""Changes of tensors that a captured job refuses or does not see: refused in a capture, warned of on one device."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rankless.compiler.tracing.refused_functions import GET_DATA, SET_DATA, refuse_change_through_data, refuse_set_data
from rankless.errors import CaptureError
from rankless.user_code import is_user_code, user_line


@contextlib.contextmanager
def refuse_untraced_changes() -> Iterator[None]:
    """Within the context, `torch.utils.swap_tensors` and the user's calls of `Tensor.set_` raise `CaptureError`."""
    swap, set_memory = torch.utils.swap_tensors, torch.Tensor.set_
    with (
        replaced(torch.utils, "swap_tensors", make_refusing_function(swap, is_refused=lambda _file: True)),
        # PyTorch's tracing calls `set_` too.
        replaced(torch.Tensor, "set_", make_refusing_function(set_memory, is_refused=is_user_code)),
    ):
        yield


def make_refusing_function(original: Callable[..., Any], *, is_refused: Callable[[str], bool]) -> Callable[..., Any]:
    """Return a replacement for a function that raises `CaptureError` if called from a file that `is_refused`."""

    @functools.wraps(original)
    def refusing_function(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if not is_refused(frame.f_code.co_filename):
            return original(*args, **kwargs)
        raise CaptureError(
            expected="a job that gives no tensor other memory",
            found=f"{original.__name__}() inside the job",
            fix="change tensors in place with copy_(): buffers inside the job, parameters outside it",
            where=user_line(frame),
        )

    return refusing_function


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the context, an attribute has another value."""
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)  # a base class has the original


@contextlib.contextmanager
def warn_of_refused_changes(
    parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, warn: Callable[[CaptureError, str], None]
) -> Iterator[None]:
    """Within the context, call `warn` for changes of tensors that a captured job refuses.

    It sees `.data` of every tensor. It costs time for each access, so a job uses it at its first call only.

    Args:
        parameters: The job's parameters by name.
        buffers: Its buffers by name.
        warn: Receives the error that a capture raises, and the line of the script, "" if that is not known.
    """
    described = {id(item): f"buffer {name!r}" for name, item in buffers.items()}
    described |= {id(item): f"parameter {name!r}" for name, item in parameters.items()}
    reads: list[tuple[Tensor, Tensor, str]] = []

    def get_data(tensor: Tensor) -> Tensor:
        data: Tensor = GET_DATA(tensor)
        if id(tensor) in described:
            reads.append((tensor, data, user_line(sys._getframe(1))))
        return data

    def set_data(tensor: Tensor, value: Tensor) -> None:
        SET_DATA(tensor, value)
        if value is not tensor and not any(owner is tensor and data is value for owner, data, _ in reads):
            warn(refuse_set_data(described.get(id(tensor))), user_line(sys._getframe(1)))

    with replaced(torch.Tensor, "data", property(get_data, set_data)):
        yield
    # `.data` has a version of its own, which counts changes made through it.
    changed = [(owner, where) for owner, data, where in reads if not data.is_inference() and data._version]
    for identity, where in {id(item): where for item, where in reversed(changed)}.items():
        if described[identity].startswith("parameter"):
            warn(refuse_change_through_data(described[identity]), where)
