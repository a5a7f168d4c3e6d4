"""Call PyTorch functions during capture without profiling PyTorch's own Python, and log their arguments."""

import sys
from collections.abc import Callable
from typing import Any

import numpy
import torch

from rankless.compiler.tracing.value_snapshots import PLAIN_TYPES


def call_untraced(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], profile: Any) -> Any:
    """Call a PyTorch function with the profiler off.

    The profiler `profile` stays on if an argument may be the user's code.
    """
    if profile is None or not any(map(may_call_user_code, (*args, *kwargs.values()))):
        return function(*args, **kwargs)
    sys.setprofile(profile)
    try:
        return function(*args, **kwargs)
    finally:
        sys.setprofile(None)


def may_call_user_code(argument: Any) -> bool:
    """Return whether an argument may be the user's Python code."""
    return callable(argument) and not isinstance(argument, type)


def describe_arguments(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the plain values among a call's arguments as text, generators themselves, and the types of all others.

    A generator that the job makes is another one in each pass.
    """
    parts: list[Any] = []
    for argument in arguments:
        if isinstance(argument, tuple | list):
            parts.append(describe_arguments(tuple(argument)))
        elif isinstance(argument, numpy.ndarray):
            parts.append(argument.tobytes())
        elif isinstance(argument, torch.Generator):
            parts.append(argument)
        else:
            parts.append(repr(argument) if isinstance(argument, PLAIN_TYPES) else type(argument).__name__)
    return tuple(parts)
