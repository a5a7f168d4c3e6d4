"""A second executor of the sharding rules, as an oracle: below autograd, one operator at a time.

The logical view traces each function of a script together with its gradient, and chooses how the pair runs on a rank's
part. Here PyTorch's autograd differentiates the logical values, as on one device. Each operator of the forward and
backward passes, as PyTorch itself dispatches them, then runs by the rules alone. So no joint trace, no plan with
gradients, no transpose of a move and no sum of gradients is shared with the executor under test.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rankless.logical_view.tensor import DividedTensor

READS = torch.ops.aten._local_scalar_dense.default


class OperatorTensor(Tensor):
    """A whole value of which this rank holds a part, seen by autograd as the whole.

    Args:
        value: The part.
    """

    divided: DividedTensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type["OperatorTensor"], value: DividedTensor) -> "OperatorTensor":
        wrapper = Tensor._make_wrapper_subclass(cls, value.logical_shape, dtype=value.dtype, device=value.device)
        wrapper.divided = value
        return wrapper

    def __init__(self, _: DividedTensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs lack the class method
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = tree_map_only(OperatorTensor, lambda tensor: tensor.divided, (args, kwargs or {}))
        with torch.no_grad():
            if func is READS:
                return given[0][0].whole().item()
            found = func(*given[0], **given[1])
        return tree_map_only(DividedTensor, OperatorTensor, found)


def get_whole(value: Tensor) -> Tensor:
    """Return a value whole, without its history. Collective."""
    return value.divided.whole() if isinstance(value, OperatorTensor) else value.detach()


def gather_gradients(parameters: Iterable[Tensor]) -> None:
    """Make the gradients of parameters whole, as a script has them. Collective."""
    for parameter in parameters:
        if isinstance(parameter.grad, OperatorTensor):
            parameter.grad = get_whole(parameter.grad)
