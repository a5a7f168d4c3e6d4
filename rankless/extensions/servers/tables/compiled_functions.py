"""Compilation of the functions that work on single ids and rows, by numba.

numba comes with the extra `ps`. It compiles a function at its first call and keeps the
machine code beside the source file. Where that folder cannot be written, each process compiles anew.
"""

from collections.abc import Callable
from typing import TypeVar, cast

from rankless.errors import TableError
from rankless.install_command import format_install_command

try:
    import numba
except ImportError as error:
    raise TableError(
        expected="numba, which compiles the functions of tables",
        found=str(error),
        fix=format_install_command("ps"),
    ) from error

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a function at its first call. It holds no lock of the interpreter while it runs.

    Numbers keep IEEE 754's meaning: without it, tests for NaN would be removed.
    """
    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # numba found no folder that it can write to
        return cast(Function, numba.njit(nogil=True)(function))
