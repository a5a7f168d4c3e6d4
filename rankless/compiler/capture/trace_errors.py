"""Why a job cannot be one program, in the words of the user's script."""

import contextlib
import traceback
from collections.abc import Iterator
from types import TracebackType

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from rankless.errors import CaptureError, RanklessError
from rankless.user_code import PACKAGE_FOLDER, is_user_code

FIX_VALUE_READ = (
    "compute with tensors instead (torch.where, masks, sums), or return the tensor as a metric and read it outside"
)
OPERATOR_DESCRIPTIONS = {
    "aten._local_scalar_dense.default": ".item(), float(), int() or bool() of a tensor, or an `if` on one,",
    "aten.nonzero.default": "nonzero(), or indexing with a mask,",
    "aten._pack_padded_sequence.default": "pack_padded_sequence",
}
# Messages of PyTorch that mean one of the things below; each is tested against the installed version.
TRACE_ERRORS: tuple[tuple[str, str, str], ...] = (
    ("requires_grad", "parameters whose requires_grad is set outside the job", "set it before the call"),
    ("numpy", "a job that stays in PyTorch", "use torch functions, or convert outside the job"),
    ("data-dependent", "a program that is the same for all values of its tensors", FIX_VALUE_READ),
    ("Cannot access data pointer", "a job that stays in PyTorch", "use torch functions, or convert outside the job"),
    (
        "Unexpected fake",
        "tensors that are made in the job to stay in it",
        "return the tensor as a metric instead of keeping it in an attribute, a list or a closure",
    ),
    (
        "use_reentrant=True",
        "activation checkpointing that autograd can see through",
        "pass use_reentrant=False to torch.utils.checkpoint.checkpoint",
    ),
    (
        "Cannot backprop through mirrored meta",
        "a job that returns its loss and leaves backward to the system",
        "take .backward() out of the job",
    ),
    (
        "mutating a non-functional tensor",
        "a job that changes nothing but buffers of its modules",
        "make the tensor a buffer of a module given as model=, or change it outside the job",
    ),
)


@contextlib.contextmanager
def convert_trace_errors(job: str, line: str) -> Iterator[None]:
    """Turn what PyTorch raises while tracing into a `CaptureError` with the user's line; user errors pass."""
    try:
        yield
    except RanklessError as error:
        # Raised while tracing, so between it and the script there are only frames of PyTorch's machinery.
        raise error.add_location(find_user_line(error) or line or None).with_traceback(None) from error.__cause__
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        operator = str(getattr(error, "func", "a value"))
        raise CaptureError(
            expected=f"job {job!r} to be one program: no branch, loop or shape that depends on a tensor's value",
            found=f"{OPERATOR_DESCRIPTIONS.get(operator, operator)} needs the value of a tensor",
            fix=FIX_VALUE_READ,
            where=find_user_line(error) or line,
        ) from strip_frames(error)
    except UnsupportedOperatorException as error:
        raise CaptureError(
            expected=f"job {job!r} to use operators that PyTorch can trace",
            found=str(error.func),
            fix="use another operator, or compute it outside the job",
            where=find_user_line(error) or line,
        ) from strip_frames(error)
    except SyntaxError as error:
        # PyTorch writes a graph as Python code, and cannot for an overload named by a keyword, as random_.from.
        raise CaptureError(
            expected=f"job {job!r} to use operators that PyTorch can write down",
            found="one that it cannot, such as tensor.random_(low, high)",
            fix="use torch.randint and its kind",
            where=find_user_line(error) or line,
        ) from strip_frames(error)
    except (RuntimeError, AssertionError) as error:
        refusal = convert_error(job, error, line)
        if refusal is error:
            raise
        raise refusal from strip_frames(error)


def strip_frames(error: BaseException) -> BaseException:
    """The error without the dozens of frames of PyTorch's tracing."""
    error.__context__ = None
    return error.with_traceback(None)


def keep_user_frames(error: Exception) -> Exception:
    """The error of a job's own code with the script's lines only, without the dozens of PyTorch's tracing and ours.

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
    shown: TracebackType | None = None
    for frame in reversed(frames):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(shown)


def convert_error(job: str, error: RuntimeError | AssertionError, line: str) -> Exception:
    """The `CaptureError` that a RuntimeError of PyTorch means, or the error itself if it is the user's own."""
    message = str(error)
    for sign, expected, fix in TRACE_ERRORS:
        if sign in message:
            return CaptureError(
                expected=f"job {job!r} to be one program: {expected}",
                found=message.splitlines()[0],
                fix=fix,
                where=find_user_line(error) or line,
            )
    return error


def find_user_line(error: BaseException) -> str | None:
    """The innermost line of the user's that led to an error, as "file.py:12"."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if is_user_code(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return None
