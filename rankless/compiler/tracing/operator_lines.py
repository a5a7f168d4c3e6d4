"""Record the script line and the module of every operator during capture."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import numpy
import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode

from rankless.compiler.ir.operator_origin import ModuleName, OperatorOrigin
from rankless.compiler.tracing.activation_checkpoints import CheckpointNumbers
from rankless.compiler.tracing.refused_tensor_functions import GET_DATA, SET_DATA, ModuleTensors, find_refusal
from rankless.compiler.tracing.replaced_functions import find_replacement
from rankless.compiler.tracing.script_generators import ScriptGenerators
from rankless.compiler.tracing.value_snapshots import PLAIN_TYPES
from rankless.user_code import is_library, is_user_code, user_line

PYTHON_LEVEL_FRAMES = ("__repr__", "__format__", "handle_torch_function")
"""PyTorch frames between the user's code and this mode, for tensor functions written in Python."""


@dataclass(frozen=True)
class TracedFunction:
    """Where the trace of a job's function begins.

    The function may have no line of its own in a file of the user, as a module of PyTorch that is a job.
    """

    caller: CodeType
    """The code that calls the function."""
    line: str
    """The job's line."""

    def find_line(self, frame: FrameType | None) -> str:
        """Return the innermost line of the script within the function.

        Without one it is a line of the installed package that the function calls, and without that the job's line.
        """
        in_package = ""
        while frame is not None and frame.f_code is not self.caller:
            file = frame.f_code.co_filename
            if is_user_code(file):
                line = user_line(frame)
                if not is_library(file):
                    return line
                in_package = in_package or line
            frame = frame.f_back
        return in_package or self.line


def make_changeable(result: Any) -> Any:
    """Return the new tensors that a function of constants has made as tensors of the trace, which may be changed.

    A view of a constant stays one: a change of it would change a tensor of the script.
    """
    if isinstance(result, tuple | list) and type(result) in (tuple, list):
        return type(result)(map(make_changeable, result))
    if type(result) is FakeTensor and not result._is_view() and not result.requires_grad:
        return FunctionalTensor.to_functional(result)
    return result


ModuleNames = Mapping[int, ModuleName]
"""The name of each module, by its `id`."""

MODULE_CALL = nn.Module.__call__.__code__


def name_modules(modules: Mapping[str, nn.Module]) -> dict[int, ModuleName]:
    """Return the names of all modules below a job's models. A module with several paths keeps the first."""
    names: dict[int, ModuleName] = {}
    for root, module in modules.items():
        for path, submodule in module.named_modules(prefix=root):
            names.setdefault(id(submodule), ModuleName(path, type(submodule).__name__))
    return names


def find_module(frame: FrameType | None, names: ModuleNames) -> ModuleName | None:
    """Return the innermost named module whose call contains `frame`; None outside of modules."""
    while frame is not None:
        if frame.f_code is MODULE_CALL and (name := names.get(id(frame.f_locals.get("self")))) is not None:
            return name
        frame = frame.f_back
    return None


class SourceLineMode(TorchFunctionMode):
    """Write the origin of traced operators into their metadata, and keep composite operators as one node.

    `tensors` are the traced parameters and buffers of the job's modules. `names` has the names of the modules.
    `generators` receives those of the script. The mode appends every call with its plain arguments to `call_log`.
    """

    def __init__(
        self,
        tensors: ModuleTensors,
        generators: ScriptGenerators,
        names: ModuleNames,
        call_log: list[Any],
        traced: TracedFunction,
        checkpoints: CheckpointNumbers,
    ) -> None:
        super().__init__()
        self._checkpoints = checkpoints
        self._traced = traced
        self._generators = generators
        self._names = names
        self._call_log = call_log
        self._module_tensors = tensors

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
        caller = frame
        while caller.f_code.co_name in PYTHON_LEVEL_FRAMES and caller.f_back is not None:
            caller = caller.f_back
        by_user = is_user_code(caller.f_code.co_filename)
        line = self._traced.find_line(frame)
        refusal = find_refusal(func, args, self._module_tensors, by_user=by_user)
        if refusal is not None:
            raise refusal.add_location(line)
        generator, drawn = self._generators.take(kwargs)
        origin = OperatorOrigin(line, find_module(frame, self._names), generator, self._checkpoints.current)
        fx_traceback.current_meta["stack_trace"] = origin.encode()
        # PyTorch queries symbolic sizes in some passes and has them cached in others.
        if not getattr(func, "__name__", "").startswith(("sym_", "_sym_")):
            self._call_log.append((getattr(func, "__name__", ""), line, describe_arguments((*args, *kwargs.items()))))
        if func == SET_DATA and not self._module_tensors.is_own_data(args[0], args[1]):
            return self._module_tensors.set_data(args[0], args[1], line)
        replacement = find_replacement(func, args)
        if replacement is not None:
            return replacement(*args, **drawn)
        result = call_untraced(func, args, drawn, profile)
        if func == GET_DATA:
            self._module_tensors.add_data(args[0], result)
        return make_changeable(result)


@contextlib.contextmanager
def record_origins(mode: SourceLineMode) -> Iterator[None]:
    """Within the context, every traced operator carries its encoded `OperatorOrigin` as `meta["stack_trace"]`."""
    before = dict(fx_traceback.current_meta)
    with fx_traceback.preserve_node_meta(), mode:
        yield
    fx_traceback.current_meta.clear()
    fx_traceback.current_meta.update(before)


def call_untraced(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], profile: Any) -> Any:
    """Call a PyTorch function with the profiler off.

    The profiler `profile` stays on if an argument may be the user's code.
    """
    given = (*args, *kwargs.values())
    if profile is None or not any(callable(item) and not isinstance(item, type) for item in given):
        return function(*args, **kwargs)
    sys.setprofile(profile)
    try:
        return function(*args, **kwargs)
    finally:
        sys.setprofile(None)


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
