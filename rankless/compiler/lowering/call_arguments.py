"""The arguments of a call with local values in place of logical ones."""

from typing import Any

from torch import fx


def replace_arguments(node: fx.Node, values: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with its tensor inputs replaced in the order of `list_tensor_slots`."""
    args, kwargs = list(node.args), dict(node.kwargs)
    operator: Any = node.target
    for position, described in enumerate(operator._schema.arguments):
        if position < len(args):
            args[position] = replace_argument(args[position], values)
        elif described.name in kwargs:
            kwargs[described.name] = replace_argument(kwargs[described.name], values)
    return tuple(args), kwargs


def replace_argument(argument: Any, values: Any) -> Any:
    """Replace each node in an argument by the next value; return other arguments unchanged."""
    if isinstance(argument, fx.Node):
        return next(values)
    if isinstance(argument, list | tuple):
        return type(argument)(next(values) if isinstance(item, fx.Node) else item for item in argument)
    return argument
