"""The supported versions of PyTorch, and all that Rankless knows of their differences. It imports no torch.

A new version needs a line in `SUPPORTED`, the range in pyproject.toml, and the tests of CONTRIBUTING.md. What it does
differently is stated here, so that no other module asks for a version.
"""

import functools
import inspect
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

SUPPORTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of PyTorch on which the tests of compiler, jobs, collectives and verify run."""
PINNED = "2.13.0"
"""The version with which CI runs all tests."""
FIRST_WITH_PYTHON_GROUPS = "2.13"
"""The first version whose functions and C++ code call every collective of a process group written in Python."""
OLDER_NAMES = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_checkpoint_without_reentrant_generator_impl": "_checkpoint_without_reentrant_generator",
}
"""Functions with a new name: those of `torch.distributed` since 2.13, that of `torch.utils.checkpoint` since 2.14."""
OLDER_PARAMETERS = {"forward_sync_buffers": "broadcast_buffers"}
"""Parameters with a new name: that of `DistributedDataParallel` since 2.13."""


@functools.cache
def find_torch_version() -> str:
    """Return the version of the installed PyTorch, such as "2.13.0+cpu", or "" if there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def find_objection(version: str) -> str:
    """Return what speaks against a version of PyTorch; "" if it is supported.

    Example:
        >>> find_objection("2.13.0+cpu")
        ''
        >>> find_objection("2.10.1")
        'older than 2.11, the first supported version'
    """
    number, first, last = map(_read_number, (version, SUPPORTED[0], SUPPORTED[-1]))
    if not version:
        return "PyTorch is not installed"
    if number < first:
        return f"older than {SUPPORTED[0]}, the first supported version"
    return f"newer than {SUPPORTED[-1]}, the last tested version" if number > last else ""


def find_objection_to_python_groups(version: str) -> str:
    """Return why process groups in shared memory cannot be used with a version of PyTorch; "" if they can.

    Example:
        >>> find_objection_to_python_groups("2.14.1")
        ''
    """
    if not version or _read_number(version) >= _read_number(FIRST_WITH_PYTHON_GROUPS):
        return ""
    return f"it needs PyTorch {FIRST_WITH_PYTHON_GROUPS} or newer, and this is {version}"


def find_function(module: Any, name: str) -> Callable[..., Any]:
    """Return a function of a module of PyTorch by its name in the newest version.

    Args:
        module: A module, such as `torch.distributed`.
        name: The name of the function in the newest supported version.
    """
    function: Callable[..., Any] = getattr(module, find_name(module, name))
    return function


def find_name(module: Any, name: str) -> str:
    """Return the name of a function in the installed version, given its name in the newest version.

    Args:
        module: A module, such as `torch.distributed`.
        name: The name of the function in the newest supported version.
    """
    return name if hasattr(module, name) else OLDER_NAMES[name]


def find_parameter(function: Callable[..., Any], name: str) -> str:
    """Return the name of a function's parameter in the installed version, given its name in the newest version.

    Args:
        function: A function or class of PyTorch.
        name: The name of the parameter in the newest supported version.
    """
    return name if name in inspect.signature(function).parameters else OLDER_PARAMETERS[name]


def _read_number(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
