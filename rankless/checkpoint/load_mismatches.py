"""What a checkpoint holds compared with what an object can take, as a few lines for people."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

MAX_LINES_PER_KIND = 6
SHAPED_LIKE_THE_PARAMETER = frozenset(
    (
        *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "prev", "step_size"),
    )
)
"""The state that PyTorch's optimizers keep for each element of a parameter."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Tensors of one object that do not fit, by name. It is false if the state fits."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shape_mismatches: list[str] = field(default_factory=list)
    dtype_mismatches: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shape_mismatches or self.dtype_mismatches)

    def describe(self) -> str:
        """Return one line for each kind of difference and group of names."""
        kinds = {
            "not in the checkpoint": self.missing,
            "only in the checkpoint": self.unexpected,
            "of another shape": self.shape_mismatches,
            "of another dtype": self.dtype_mismatches,
        }
        return "\n".join(
            line
            for kind, names in kinds.items()
            if names
            for line in (f"{kind}:", *(f"  {text}" for text in shorten_names(names)))
        )


def compare_module(name: str, module: nn.Module, saved: Mapping[str, Any]) -> Differences:
    """Return which tensors of a saved state do not fit the module as it is now."""
    here = module.state_dict()
    missing = [f"{name}.{key}" for key in here if key not in saved]
    unexpected = [f"{name}.{key}" for key in saved if key not in here]
    shape_mismatches, dtype_mismatches = [], []
    for key, ours in here.items():
        theirs = saved.get(key)
        if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
            continue
        if ours.shape != theirs.shape and not _is_lazy(ours):
            shape_mismatches.append(f"{name}.{key}: {tuple(theirs.shape)} saved, {tuple(ours.shape)} here")
        elif not _is_lossless(theirs.dtype, ours.dtype):
            dtype_mismatches.append(f"{name}.{key}: {_dtype_name(theirs.dtype)} saved, {_dtype_name(ours.dtype)} here")
    return Differences(
        missing=missing, unexpected=unexpected, shape_mismatches=shape_mismatches, dtype_mismatches=dtype_mismatches
    )


def select_fitting(module: nn.Module, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a saved state that the module can take."""
    here = module.state_dict()
    return {
        key: value
        for key, value in saved.items()
        if key in here and (not isinstance(value, Tensor) or value.shape == here[key].shape or _is_lazy(here[key]))
    }


def compare_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> Differences:
    """Return which state of an optimizer does not have the shape of its parameter.

    PyTorch does not check it: the step would fail later, or would broadcast and be wrong.
    """
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        found = len(groups) if isinstance(groups, list) else 0
        return Differences(shape_mismatches=[f"{name}: {found} groups saved, {len(optimizer.param_groups)} here"])
    shape_mismatches = []
    for number, (theirs, ours) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        keys, parameters = list(theirs["params"]), ours["params"]
        if len(keys) != len(parameters):
            shape_mismatches.append(f"{name}: {len(keys)} parameters saved in group {number}, {len(parameters)} here")
            continue
        for key, parameter in zip(keys, parameters, strict=True):
            for kind, value in saved.get("state", {}).get(key, {}).items():
                if kind in SHAPED_LIKE_THE_PARAMETER and isinstance(value, Tensor) and value.shape != parameter.shape:
                    shapes = f"{tuple(value.shape)} saved, {tuple(parameter.shape)} here"
                    shape_mismatches.append(f"{name}.state.{key}.{kind}: {shapes}")
    return Differences(shape_mismatches=shape_mismatches)


def shorten_names(names: Iterable[str]) -> list[str]:
    """Return a few lines of names, with one line for all names that differ only in numbers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        head, colon, tail = name.partition(":")
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", head) + colon + tail, []).append(name)
    lines = [
        members[0] if len(members) == 1 else f"{pattern} ({len(members)} of them)"
        for pattern, members in groups.items()
    ]
    left = sum(len(members) for members in list(groups.values())[MAX_LINES_PER_KIND:])
    return lines[:MAX_LINES_PER_KIND] + ([f"and {left} more"] if left else [])


def _is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, (UninitializedParameter, UninitializedBuffer))


def _is_lossless(saved: torch.dtype, here: torch.dtype) -> bool:
    kinds = {(dtype.is_floating_point, dtype.is_complex, dtype == torch.bool) for dtype in (saved, here)}
    return saved == here or (len(kinds) == 1 and torch.promote_types(saved, here) == here)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
