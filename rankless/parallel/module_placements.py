"""Placements of parameters that a script writes at the modules that have them.

A module carries them as an attribute. So they are copied with the module, and are no part of its state.
"""

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from torch import nn
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from rankless.errors import ConfigError

LayerAxis = Literal["tensor", "expert"]
Module = TypeVar("Module", bound=nn.Module)
ATTRIBUTE = "_rankless_placements"
EXAMPLE = 'for example rankless.place(nn.Linear(64, 256), {"weight": Shard(0)})'


def place(module: Module, placements: Placement | Mapping[str, Placement], *, axis: LayerAxis = "tensor") -> Module:
    """Say at a module how an axis of the mesh divides its parameters.

    Without this axis, and on one device, it has no effect. What must be divided together with a named parameter
    follows it, and all other parameters are divided as the plan of the job says. The plan has priority:
    `rankless.Plan(tensor=…)` and `rankless.Plan(experts=…)`, and a plan file.

    Args:
        module: The module.
        placements: `torch.distributed.tensor.Shard(dim)` or `Replicate()` for all parameters of the module, or a dict
            from names of its parameters, which may be patterns as in a shell.
        axis: The axis: "tensor" or "expert".

    Returns:
        The module itself.

    Raises:
        ConfigError: An argument is invalid, or a name matches no parameter of the module.

    Example:
        >>> import torch
        >>> from torch.distributed.tensor import Shard
        >>> layer = rankless.place(torch.nn.Linear(8, 32), {"weight": Shard(0)})
        >>> type(layer).__name__
        'Linear'
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(expected="a module of PyTorch", found=type(module).__name__, fix=EXAMPLE)
    if axis not in get_args(LayerAxis):
        raise ConfigError(
            expected=f"axis= as one of {', '.join(map(repr, get_args(LayerAxis)))}", found=f"axis={axis!r}", fix=EXAMPLE
        )
    given = placements if isinstance(placements, Mapping) else {"*": placements}
    for name, placement in given.items():
        if not isinstance(name, str) or type(placement) not in (Shard, Replicate):
            raise ConfigError(
                expected="Shard(dim) or Replicate() of torch.distributed.tensor, or a dict from names to them",
                found=f"{placement!r} for {name!r}" if isinstance(placements, Mapping) else repr(placements),
                fix=EXAMPLE,
            )
    known = getattr(module, ATTRIBUTE, {})
    setattr(module, ATTRIBUTE, {**known, axis: {**known.get(axis, {}), **given}})
    return module


def list_placed(root: nn.Module, axis: str) -> list[tuple[str, nn.Module, Mapping[str, Placement]]]:
    """Return the modules in a model that carry placements for an axis, outer ones first, with their names.

    Args:
        root: The model.
        axis: The axis.
    """
    found = ((name, module, getattr(module, ATTRIBUTE, {}).get(axis)) for name, module in root.named_modules())
    return [(name, module, placements) for name, module, placements in found if placements]
