"""Convert errors of PyTorch's tracing into `CaptureError`s that refer to the user's script.

PyTorch cannot trace tensors in compressed sparse layouts: a capture refuses them, and one device warns.
"""

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from rankless.compiler.capture.refused_training_calls import REFUSED_WITHOUT_CAPTURE
from rankless.errors import CaptureError, RanklessError
from rankless.user_code import PACKAGE_FOLDER, display_name, is_user_code

FIX_VALUE_READ = (
    "compute with tensors instead (torch.where, masks, sums), or return the tensor as a metric and read it outside"
)
COMPRESSED_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
COMPRESSED_EXPECTED = "sparse tensors in the COO layout, which PyTorch can trace"
COMPRESSED_FIX = "convert it outside the job, with to_sparse_coo()"
OPERATOR_DESCRIPTIONS = {
    "aten._local_scalar_dense.default": ".item(), float(), int() or bool() of a tensor, or an `if` on one,",
    "aten.nonzero.default": "nonzero(), or indexing with a mask,",
    "aten._pack_padded_sequence.default": "pack_padded_sequence",
}
CHANGED_OUTSIDE = ("mutating a non-functional tensor", "entirely functional graph", "placeholders={")
"""Parts of PyTorch's messages, of internal checks, if a job changes a tensor that is not its own."""
# PyTorch messages (a substring), and the expectation and fix that they stand for. Tests check each with the installed
# version.
TRACE_ERRORS: tuple[tuple[str, str, str], ...] = (
    (
        "invalid python storage",
        "a job that computes with tensors, not with their storage",
        "use copy_() of the tensor itself, or change it outside the job",
    ),
    ("requires_grad", "parameters whose requires_grad is set outside the job", "set it before the call"),
    ("numpy", "a job that stays in PyTorch", "use torch functions, or convert outside the job"),
    ("data-dependent", "a program that is the same for all values of its tensors", FIX_VALUE_READ),
    ("Cannot access data pointer", "a job that stays in PyTorch", "use torch functions, or convert outside the job"),
    *(
        (
            pattern,
            "tensors created in the job to stay in the job",
            "return the tensor as a metric instead of keeping it in an attribute, a list or a closure",
        )
        for pattern in ("Unexpected fake", "in tensor_tracker")  # the second before PyTorch 2.13
    ),
    (
        "Cannot backprop through mirrored meta",
        "a job that returns its loss and leaves backward to Rankless",
        "remove .backward() from the job",
    ),
    *(
        (
            pattern,
            "a job that changes no tensors but buffers of its modules",
            "make the tensor a buffer of a module passed as model=, or change it outside the job",
        )
        for pattern in CHANGED_OUTSIDE
    ),
    (
        "do not have strides",
        COMPRESSED_EXPECTED,
        COMPRESSED_FIX,
    ),
    (
        "output has alias annotations",
        "operators that PyTorch can trace",
        "use the operator that returns a new tensor, such as torch.polygamma for polygamma_",
    ),
    (
        "Attempted to set the storage of a tensor",
        "operators that PyTorch can trace",
        "make tensors with new_empty(...) or torch.empty(...), not with tensor.new()",
    ),
    (
        "INTERNAL ASSERT FAILED",
        "operators that PyTorch can trace",
        "compute it with other operators, or outside the job",
    ),
)

VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
CONVERTED_ERRORS = (*VALUE_ERRORS, UnsupportedOperatorException, SyntaxError, RuntimeError, AssertionError)

GENERATED_FILE = "<rankless program>"
"""The file name of generated code."""
SCRIPT_LINES = "script_lines"
"""The global of generated code that maps its lines to lines of the script, as "file.py:12"."""
WHOLE_BATCH = "or pass capture=False to rankless.job, and every rank runs the job on the whole batch"


@contextlib.contextmanager
def convert_trace_errors(job: str, line: str) -> Iterator[None]:
    """Convert errors that PyTorch raises while tracing into `CaptureError`s with the user's line; user errors pass."""
    try:
        yield
    except RanklessError as error:
        # Our own error, raised while tracing: only PyTorch frames lie between it and the script, so drop them.
        raise error.add_location(find_user_line(error) or line or None).with_traceback(None) from error.__cause__
    except CONVERTED_ERRORS as error:
        refusal = convert_error(job, error, line)
        if refusal is error:
            raise
        raise refusal from strip_frames(error)


@contextlib.contextmanager
def offer_whole_batch() -> Iterator[None]:
    """Within the context, the fix of a `CaptureError` names `capture=False` too, unless it would refuse the same."""
    try:
        yield
    except CaptureError as error:
        if error.fix in REFUSED_WITHOUT_CAPTURE:
            raise
        raise CaptureError(
            expected=error.expected, found=error.found, fix=f"{error.fix}; {WHOLE_BATCH}", where=error.where
        ).with_traceback(None) from error.__cause__


def strip_frames(error: BaseException) -> BaseException:
    """Return the error without PyTorch's many tracing frames.

    Some hold guards of PyTorch's dispatcher, which would change its state again when they are collected later.
    """
    traceback.clear_frames(error.__traceback__)
    error.__context__ = None
    return error.with_traceback(None)


def keep_user_frames(error: Exception) -> Exception:
    """Return an error of a job's own code with the frames of the script only.

    An error of Rankless's own code keeps all its frames.
    """
    frames = []
    innermost = trace = error.__traceback__
    while trace is not None:
        innermost = trace
        if is_user_code(trace.tb_frame.f_code.co_filename):
            frames.append(trace)
        trace = trace.tb_next
    if not frames or innermost is None or innermost.tb_frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        return error
    traceback_of_user: TracebackType | None = None
    for frame in reversed(frames):
        traceback_of_user = TracebackType(traceback_of_user, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(traceback_of_user)


def convert_error(job: str, error: Exception, line: str) -> Exception:
    """Return the `CaptureError` for a known PyTorch error, or the error itself if the user's code raised it."""
    if isinstance(error, VALUE_ERRORS):
        operator = str(getattr(error, "func", "a value"))
        expected = "to be one program: no branch, loop or shape that depends on a tensor's value"
        found, fix = f"{OPERATOR_DESCRIPTIONS.get(operator, operator)} needs the value of a tensor", FIX_VALUE_READ
    elif isinstance(error, UnsupportedOperatorException):
        expected = "to use operators that PyTorch can trace"
        found, fix = str(error.func), "use another operator, or compute it outside the job"
    elif isinstance(error, SyntaxError):
        # PyTorch writes a graph as Python code, which fails for an overload named by a keyword, such as random_.from.
        expected = "to use operators that PyTorch can write as Python code"
        found = "an operator that it cannot write, such as tensor.random_(low, high)"
        fix = "use torch.randint or similar functions"
    else:
        message = str(error)
        known = [
            item
            for item in TRACE_ERRORS
            if item[0] in message and not (item[0] == "requires_grad" and isinstance(error, NotImplementedError))
        ]
        if not known:
            return error
        pattern, wanted, fix = known[0]
        expected, found = f"to be one program: {wanted}", message.partition("\n")[0]
        if pattern in CHANGED_OUTSIDE:
            found = "a tensor from outside the job changed in place"
    where = find_user_line(error) or line
    return CaptureError(expected=f"job {job!r} {expected}", found=found, fix=fix, where=where)


def find_user_line(error: BaseException) -> str | None:
    """Return the innermost user line that led to an error, as "file.py:12"; None if there is none."""
    lines = []
    for frame, number in traceback.walk_tb(error.__traceback__):
        if is_user_code(frame.f_code.co_filename):
            lines.append(f"{display_name(frame.f_code.co_filename)}:{number}")
        elif line := find_generated_line(frame, number):
            lines.append(line)
    # PyTorch generates code without a file, and a script may have none either.
    return next((line for line in reversed(lines) if not line.startswith("<string>")), lines[-1] if lines else None)


def find_generated_line(frame: FrameType, number: int) -> str:
    """Return the script's line for a line of generated code, as "file.py:12"; empty if it is unknown or other code."""
    lines: dict[int, str] = frame.f_globals[SCRIPT_LINES] if frame.f_code.co_filename == GENERATED_FILE else {}
    return lines.get(number, "")


def find_compressed_tensor(function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> CaptureError | None:
    """Return the error that a capture raises for a compressed sparse tensor; None if a job reads none.

    Args:
        function: The job's function. Tensors in its closure and among the globals that it names are seen.
        modules: The job's modules by name, whose parameters and buffers are seen.
    """
    for name, value in list_read_tensors(function, modules):
        if value.layout in COMPRESSED_LAYOUTS:
            return CaptureError(
                expected=COMPRESSED_EXPECTED, found=f"{name} has the layout {value.layout}", fix=COMPRESSED_FIX
            )
    return None


def list_read_tensors(function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> Iterable[tuple[str, Tensor]]:
    """Yield the tensors that a job may read besides its arguments, by name."""
    for name, module in modules.items():
        yield from module.named_parameters(prefix=name)
        yield from module.named_buffers(prefix=name)
    try:
        variables = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # no Python function, or a variable of the closure has no value yet
        return
    for name, value in {**variables.globals, **variables.nonlocals}.items():
        if isinstance(value, Tensor):
            yield name, value
