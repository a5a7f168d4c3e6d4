"""Changes of tensors that a captured job refuses or does not see: refused in a capture, warned of on one device."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rankless.compiler.tracing.refused_functions import GET_DATA, SET_DATA, ModuleTensors, refuse_set_data
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
def leave_recurrent_weights() -> Iterator[None]:
    """Within the context, recurrent layers on a GPU do not move their weights into one block of memory.

    PyTorch does it in a forward pass whose weights are other tensors than before, as those of a trace are.
    """
    with replaced(nn.RNNBase, "flatten_parameters", lambda _: None):
        yield


@contextlib.contextmanager
def warn_of_refused_changes(tensors: ModuleTensors, *, warn: Callable[[CaptureError, str], None]) -> Iterator[None]:
    """Within the context, call `warn` when the script sets `.data` of a tensor in a way that a captured job refuses.

    It costs time for each access of `.data`, so a job uses it at its first call only.

    Args:
        tensors: The job's parameters and buffers.
        warn: Receives the error that a capture raises, and the line of the script.
    """

    def get_data(tensor: Tensor) -> Tensor:
        data: Tensor = GET_DATA(tensor)
        tensors.add_data(tensor, data)
        return data

    def set_data(tensor: Tensor, value: Tensor) -> None:
        is_refused = not tensors.is_own_data(tensor, value) and not tensors.may_set_data(tensor, value)
        SET_DATA(tensor, value)
        if is_refused:
            warn(refuse_set_data(tensors.describe(tensor)), user_line(sys._getframe(1)))

    with replaced(torch.Tensor, "data", property(get_data, set_data)):
        yield
