"""What watches a job while it is captured: every operator gets the line of the user's code it came from."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F  # the field's name for it
from torch.overrides import TorchFunctionMode

from rankless.program.whole_operators import RECURRENT, whole_linear, whole_recurrent

TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
OUR_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep


def is_users(frame: FrameType) -> bool:
    """Whether a frame belongs to neither PyTorch nor Rankless."""
    return not frame.f_code.co_filename.startswith((TORCH_FOLDER, OUR_FOLDER))


def user_line(frame: FrameType | None) -> str:
    """The nearest line outside PyTorch and Rankless, as "file.py:12"."""
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class LineMode(TorchFunctionMode):
    """Writes the user's line into the metadata of what is traced, and keeps some operators whole."""

    def __torch_function__(  # PyTorch's protocol
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        fx_traceback.current_meta["stack_trace"] = user_line(sys._getframe(1))
        if func is F.linear:
            return whole_linear(*args, **kwargs)
        kind = getattr(func, "__name__", "")
        # A packed sequence calls the same functions with other arguments; those are left to PyTorch.
        if RECURRENT.get(kind) is func and len(args) == 9 and isinstance(args[3], bool):
            return whole_recurrent(kind, *args)
        return func(*args, **kwargs)


@contextlib.contextmanager
def lines_recorded() -> Iterator[None]:
    """Every operator traced inside carries its user's line as `meta["stack_trace"]`."""
    before = dict(fx_traceback.current_meta)
    with fx_traceback.preserve_node_meta(), LineMode():
        yield
    fx_traceback.current_meta.clear()
    fx_traceback.current_meta.update(before)
