"""What watches a job while it is captured: every operator gets the line of the user's code it came from."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F  # the field's name for it
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rankless.compiler.ir.custom_ops import RECURRENT_FUNCTIONS, capture_linear, capture_recurrent
from rankless.compiler.tracing.untraced_calls import call_untraced, describe_arguments
from rankless.errors import CaptureError
from rankless.user_code import is_user_code, user_line

REFUSED_FUNCTIONS: dict[Any, str] = {
    torch.Tensor.__repr__: "print of a tensor",
    torch.Tensor.__format__: "a tensor formatted as text",
    torch.Tensor.numpy: "a tensor turned into a NumPy array",
}
"""Functions that would do something else while a job is captured than when it runs plainly."""

PYTHON_LEVEL_FRAMES = ("__repr__", "__format__", "handle_torch_function")
"""Frames of PyTorch's between its user and this mode, for functions of a tensor that are written in Python."""


def find_calling_frame(frame: FrameType) -> FrameType:
    """The frame that called a function of PyTorch's."""
    while frame.f_code.co_name in PYTHON_LEVEL_FRAMES and frame.f_back is not None:
        frame = frame.f_back
    return frame


SETS_REQUIRES_GRAD = "requires_grad of a parameter or buffer set"
REFUSED_ON_PARAMETERS: dict[Any, str] = {
    torch.Tensor.requires_grad_: SETS_REQUIRES_GRAD,
    torch.Tensor.requires_grad.__set__: SETS_REQUIRES_GRAD,  # type: ignore[attr-defined]  # a getset descriptor
}
"""Which gradients a program makes is settled before; of other tensors a job may ask for them (gradient penalties)."""


class SourceLineMode(TorchFunctionMode):
    """Writes the user's line into the metadata of what is traced, and keeps some operators whole.

    `tensors` are the traced parameters and buffers of the job's modules; `trail` gets every call with its plain
    arguments.
    """

    def __init__(self, tensors: Iterable[Tensor], call_log: list[Any]) -> None:
        super().__init__()
        self._call_log = call_log
        self._known = {id(tensor) for tensor in tensors}

    def __torch_function__(  # PyTorch's protocol
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        profile, frame = sys.getprofile(), sys._getframe(1)
        sys.setprofile(None)
        try:
            return self._called(func, args, kwargs or {}, frame, profile)
        finally:
            sys.setprofile(profile)

    def _called(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType, profile: Any
    ) -> Any:
        refused = REFUSED_FUNCTIONS.get(func) if is_user_code(find_calling_frame(frame).f_code.co_filename) else None
        if refused is None and args and id(args[0]) in self._known:
            refused = REFUSED_ON_PARAMETERS.get(func)
        if refused is not None:
            raise CaptureError(
                expected="a job that computes with tensors and does not look at them: they have no values while "
                "it is captured",
                found=f"{refused} inside the job",
                fix="do this outside the job; a tensor's values may be returned as a metric",
                where=user_line(frame),
            )
        line = fx_traceback.current_meta["stack_trace"] = user_line(frame)
        # Of sizes that vary PyTorch asks in some passes and knows in others.
        if not getattr(func, "__name__", "").startswith(("sym_", "_sym_")):
            self._call_log.append((getattr(func, "__name__", ""), line, describe_arguments((*args, *kwargs.items()))))
        if func is F.linear:
            return capture_linear(*args, **kwargs)
        kind = getattr(func, "__name__", "")
        # A packed sequence calls the same functions with other arguments; those are left to PyTorch.
        if RECURRENT_FUNCTIONS.get(kind) is func and len(args) == 9 and isinstance(args[3], bool):
            return capture_recurrent(kind, *args)
        return call_untraced(func, args, kwargs, profile)


@contextlib.contextmanager
def record_lines(tensors: Iterable[Tensor], call_log: list[Any]) -> Iterator[None]:
    """Every operator traced inside carries its user's line as `meta["stack_trace"]`; `trail` tells them in order."""
    before = dict(fx_traceback.current_meta)
    with fx_traceback.preserve_node_meta(), SourceLineMode(tensors, call_log):
        yield
    fx_traceback.current_meta.clear()
    fx_traceback.current_meta.update(before)
