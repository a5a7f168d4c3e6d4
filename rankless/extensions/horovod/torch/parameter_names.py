"""The name under which each parameter's gradient is reduced."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

NOT_PAIRS = (
    "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
)


def assign_parameter_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[Any] | None
) -> dict[torch.Tensor, str]:
    """Return the name of each parameter of the optimizer, in its order.

    Without `named_parameters`, a name consists of the indices of the group and of the parameter. Raises ValueError if
    `named_parameters` contains anything but pairs, repeats a name, or omits a parameter.
    """
    if named_parameters is None:
        return {
            parameter: f"allreduce.noname.{group_index}.{index}"
            for group_index, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(NOT_PAIRS)
    repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(sorted(repeated))}"
        )
    names = {parameter: name for name, parameter in pairs}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unnamed = [str(id(parameter)) for parameter in parameters if parameter not in names]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"Python object ids: {', '.join(unnamed)}"
        )
    return {parameter: names[parameter] for parameter in parameters}
