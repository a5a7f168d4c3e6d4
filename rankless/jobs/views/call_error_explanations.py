"""What a script sees of an exception in a call of a job: its own, or an error that names the line and a way out."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import fx

from rankless.compiler.capture.trace_errors import GENERATED_FILE, WHOLE_BATCH, find_user_line, keep_user_frames
from rankless.context.world import World
from rankless.errors import CaptureError, DataError, RanklessError, RanksDiverged
from rankless.jobs.job_definition import JobDefinition
from rankless.user_code import PACKAGE_FOLDER, is_user_code

CAPTURE = f"{PACKAGE_FOLDER}compiler/capture/capture.py"
COMPILER = f"{PACKAGE_FOLDER}compiler/"
TORCH = str(Path(torch.__file__).parent)
HIGHER_ORDER = f"{TORCH}/_higher_order_ops/"
TRACERS = (HIGHER_ORDER, *(f"{TORCH}/{name}/" for name in ("_dynamo", "_functorch", "fx")))
"""Parts of PyTorch that trace, and that a plain script does not run."""
MISTAKES = (ArithmeticError, AssertionError, AttributeError, KeyError, NameError, RecursionError, TypeError)
"""Exceptions that PyTorch's checks of arguments do not raise on purpose, where its Python code stands for kernels."""
NEEDS_INT64 = re.compile(r"expected (target dtype to be|scalar type) Long\b|index tensor of type LongTensor")
IN_PLACE_OF_KERNELS = tuple(
    f"{TORCH}/{name}"
    for name in ("_decomp/", "_prims/", "_prims_common/", "_refs/", "_subclasses/", "_meta_registrations")
)


def explain_failure(job: JobDefinition, world: World, error: Exception) -> Exception:
    """Return what a call of a job raises in place of an exception, whose cause then is that exception or its own.

    Args:
        job: The job.
        world: The workers. If one of them is at another place of the script, that is the cause.
        error: An exception that is none of Rankless.

    Returns:
        A `CaptureError` if Rankless or PyTorch could not make a program of the job. A `DataError` that names the
        conversion for labels of another dtype than PyTorch needs. The exception itself if the script's code has raised
        it, with the frames of the script only.
    """
    try:
        world.mesh.check_sync_point_again()
    except RanksDiverged as divergence:
        return set_cause(divergence.with_traceback(None), error)
    if isinstance(error, RuntimeError) and NEEDS_INT64.search(str(error)):
        return set_cause(refuse_index_dtype(error, find_user_line(error) or job.line), error)
    frames = list(walk(error.__traceback__))
    files = [frame.f_code.co_filename for frame in frames]
    if not any(file.startswith(COMPILER) for file in files) or GENERATED_FILE in files:
        return keep_user_frames(error)
    line = find_user_line(error) or job.line
    if line.startswith("<string>") and job.line:
        line = job.line  # PyTorch generates code without a file
    if not is_internal(error, files):
        error.add_note(
            f"raised while job {job.name!r} became a program for several workers, from "
            f"{line}. If the plain script does not raise it, pass capture=False to "
            "rankless.job"
        )
        return keep_user_frames(error)
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    operator = find_operator(frames)
    outer = next((Path(file).stem for file in files if file.startswith(HIGHER_ORDER)), None)
    if operator is not None:
        text, line = f"{text}, from {operator.target}", operator.meta.get("line") or line
    elif outer is not None:
        text = f"a call of {outer}(), which takes Python functions: {text}"
    refusal = CaptureError(
        expected=f"job {job.name!r} to be one program that several workers can divide",
        found=text,
        fix="compute it with other operators"
        + (", or with Python's own `if` and `for`" if outer else "")
        + f"; {WHOLE_BATCH}",
        where=line or None,
    )
    return set_cause(refusal, error)


def refuse_index_dtype(error: Exception, line: str) -> DataError:
    """Return the error for labels or indices whose dtype PyTorch does not take."""
    return DataError(
        expected="labels and indices of int64, which PyTorch needs here",
        found=str(error).partition("\n")[0],
        fix="convert them: labels.long() for a tensor, labels.astype('int64') for a numpy array",
        where=line or None,
    )


def set_cause(refusal: RanklessError, error: Exception) -> RanklessError:
    """Return an error that another exception has caused."""
    refusal.__cause__ = error
    return refusal


def walk(trace: TracebackType | None) -> Iterator[FrameType]:
    """Yield the frames of a traceback, from the outermost."""
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def is_internal(error: Exception, files: list[str]) -> bool:
    """Return whether an exception while a job was compiled comes from Rankless or PyTorch, not from the script.

    Args:
        error: The exception.
        files: The files of its frames, from the outermost.
    """
    if CAPTURE not in files:
        return True  # the script's function does not run any more
    inner = files[len(files) - files[::-1].index(CAPTURE) :]
    if not any(map(is_user_code, inner)):
        return True
    innermost = next(file for file in reversed(inner) if not file.startswith("<"))
    if any(file.startswith(HIGHER_ORDER) for file in inner) or innermost.startswith((PACKAGE_FOLDER, *TRACERS)):
        return True
    return innermost.startswith(IN_PLACE_OF_KERNELS) and isinstance(error, MISTAKES)


def find_operator(frames: list[FrameType]) -> fx.Node | None:
    """Return the operator on which the compiler worked, in the innermost frame that has one."""
    for frame in reversed(frames):
        if frame.f_code.co_filename.startswith(COMPILER):
            for value in (frame.f_locals.get("node"), getattr(frame.f_locals.get("call"), "node", None)):
                if isinstance(value, fx.Node):
                    return value
    return None
