"""Record the script line of every operator during capture."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F  # PyTorch's customary alias
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
"""Functions that behave differently during capture than in the plain script."""

PYTHON_LEVEL_FRAMES = ("__repr__", "__format__", "handle_torch_function")
"""PyTorch frames between the user's code and this mode, for tensor functions written in Python."""


def find_calling_frame(frame: FrameType) -> FrameType:
    """Return the frame that called a PyTorch function."""
    while frame.f_code.co_name in PYTHON_LEVEL_FRAMES and frame.f_back is not None:
        frame = frame.f_back
    return frame


SETS_REQUIRES_GRAD = "requires_grad of a parameter or buffer set"
REFUSED_ON_PARAMETERS: dict[Any, str] = {
    torch.Tensor.requires_grad_: SETS_REQUIRES_GRAD,
    torch.Tensor.requires_grad.__set__: SETS_REQUIRES_GRAD,  # type: ignore[attr-defined]  # a getset descriptor
}
"""Functions refused on parameters and buffers only, because the program's gradients are fixed before the trace.

On other tensors a job may set `requires_grad`, as gradient penalties do.
"""


class SourceLineMode(TorchFunctionMode):
    """Write the user's line into the metadata of traced operators, and keep composite operators as one node.

    `tensors` are the traced parameters and buffers of the job's modules. The mode appends every call with its plain
    arguments to `call_log`.
    """

    def __init__(self, tensors: Iterable[Tensor], call_log: list[Any]) -> None:
        super().__init__()
        self._call_log = call_log
        self._module_tensors = {id(tensor) for tensor in tensors}

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
            return self._dispatch(func, args, kwargs or {}, frame, profile)
        finally:
            sys.setprofile(profile)

    def _dispatch(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType, profile: Any
    ) -> Any:
        refused = REFUSED_FUNCTIONS.get(func) if is_user_code(find_calling_frame(frame).f_code.co_filename) else None
        if refused is None and args and id(args[0]) in self._module_tensors:
            refused = REFUSED_ON_PARAMETERS.get(func)
        if refused is not None:
            raise CaptureError(
                expected="a job that does not read the values of tensors: they have none during capture",
                found=f"{refused} inside the job",
                fix="do this outside the job; return the tensor to read its values there",
                where=user_line(frame),
            )
        line = fx_traceback.current_meta["stack_trace"] = user_line(frame)
        # PyTorch queries symbolic sizes in some passes and has them cached in others.
        if not getattr(func, "__name__", "").startswith(("sym_", "_sym_")):
            self._call_log.append((getattr(func, "__name__", ""), line, describe_arguments((*args, *kwargs.items()))))
        if func is F.linear:
            return capture_linear(*args, **kwargs)
        kind = getattr(func, "__name__", "")
        # A packed sequence calls the same functions with other arguments. Leave those calls to PyTorch.
        if RECURRENT_FUNCTIONS.get(kind) is func and len(args) == 9 and isinstance(args[3], bool):
            return capture_recurrent(kind, *args)
        return call_untraced(func, args, kwargs, profile)


@contextlib.contextmanager
def record_lines(tensors: Iterable[Tensor], call_log: list[Any]) -> Iterator[None]:
    """Within the context, every traced operator carries the user's line as `meta["stack_trace"]`.

    The context appends each call, in order, to `call_log`.
    """
    before = dict(fx_traceback.current_meta)
    with fx_traceback.preserve_node_meta(), SourceLineMode(tensors, call_log):
        yield
    fx_traceback.current_meta.clear()
    fx_traceback.current_meta.update(before)
