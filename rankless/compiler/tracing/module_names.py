"""Find the module of the job's models whose call runs an operator."""

from collections.abc import Mapping
from types import FrameType

from torch import nn

from rankless.compiler.ir.operator_origin import ModuleName

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
