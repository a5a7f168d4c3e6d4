"""Modules that a script marks as the dense part of its model, which heterogeneous workers compute."""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from rankless.errors import ConfigError

MARK = "_rankless_is_dense"

Module = TypeVar("Module", bound=nn.Module)


def mark_dense(module: Module) -> Module:
    """Mark a module as the dense part of its model, and return it.

    In a run with heterogeneous workers they compute the module and all that follows from its results, such as the loss.
    The other workers compute what comes before, such as lookups in tables. Other runs do as without the mark. A copy of
    the module has the mark, too. Several modules of a model may be marked.

    Args:
        module: The module, such as the layers after all lookups.

    Raises:
        ConfigError: It is no module.

    Example:
        >>> layers = rankless.parameter_server.mark_dense(torch.nn.Linear(16, 1))
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            expected="a module of the model", found=type(module).__name__, fix="pass the layers after all lookups"
        )
    setattr(module, MARK, True)
    return module


def find_dense(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the paths of marked modules in the modules of a job, such as "model.layers"."""
    return [
        ".".join(filter(None, (name, path)))
        for name, module in modules.items()
        for path, part in module.named_modules()
        if getattr(part, MARK, False)
    ]
