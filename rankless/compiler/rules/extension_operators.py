"""Operators that extensions add to programs.

Note [operators of extensions]: an extension that adds operators names, in its declaration, the module of them. Their
namespace is the name of the extension. So the compiler finds them without a registry, and imports the module only for a
program that has one. The module has `OPERATORS`, with an `ExtensionOperator` for each.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from rankless.compiler.rules.strategy import ShardingRule
from rankless.config.extensions import find_extension, import_declared

_OWN_NAMESPACES = ("aten", "prims", "rankless")


@dataclass(frozen=True, kw_only=True)
class ExtensionOperator:
    """How programs run an operator of an extension."""

    rule: ShardingRule
    """Yields the strategies by which workers divide it."""
    local: Callable[..., Any]
    """Runs in its place on each worker's values. A `Lookup` for an operator that looks rows up."""
    has_effects: bool = False
    """Whether one worker alone must compute each element, so that it cannot just be replicated. No pass merges or
    repeats it, and microbatches that have its inputs in common run it once."""


class Lookup:
    """A function that looks up rows by their ids.

    Its arguments are a tensor, the ids, the number of what has the rows, and others. Where the ids follow from a
    program's inputs alone, they are known before a call; see `codegen.lookup_ids`.

    Args:
        function: The function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        """Look rows up."""
        return self._function(*args)


@functools.cache
def find_operator(operator: Any) -> ExtensionOperator | None:
    """Return what an extension says of its operator; None for any other function."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace in _OWN_NAMESPACES:
        return None
    extension = find_extension(operator.namespace)
    if extension is None or not extension.operators:
        return None
    operators = import_declared(extension.name, "operators", extension.operators, name="OPERATORS")
    return cast(ExtensionOperator | None, operators.get(operator))


def is_lookup(operator: Any) -> bool:
    """Return whether an operator of a program before it is divided looks rows up."""
    found = find_operator(operator)
    return found is not None and isinstance(found.local, Lookup)


def has_effects(operator: Any) -> bool:
    """Return whether each element of an operator must be computed by one worker only."""
    found = find_operator(operator)
    return found is not None and found.has_effects
