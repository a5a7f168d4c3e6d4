"""Tensors that a `load_state_dict` gets before their elements are read.

Note [unread tensors]: an unread tensor has a shape and a dtype. A function of PyTorch that needs elements reads them
from the file at that moment. If it could change them, or return a view of them, the value is kept, so later reads see
the changes. `parameter.copy_(unread)` keeps nothing, and reads only a worker's rows if the parameter is divided. Code
below PyTorch's functions, such as `Generator.set_state`, raises for lack of memory. Small tensors of integers, among
which are states of generators, are therefore never unread. When `load_state_dict` has returned, `settle` gives the
tensors that are still alive their values: the same objects then are plain tensors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankless.deferred_models.build_and_materialize import become
from rankless.ownership.partitioned_tensor import CallsWithWholes, call_with_wholes
from rankless.ownership.stored_value import ConvertedSource, StoredValue

ALIASES = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]  # the stubs have it as a tensor


class UnreadTensor(CallsWithWholes, Tensor):
    """A tensor whose elements are in a file; see Note [unread tensors]."""

    partition: StoredValue

    @staticmethod
    def __new__(cls: "type[UnreadTensor]", value: StoredValue) -> "UnreadTensor":
        """Make a tensor of a value."""
        made: UnreadTensor = Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)
        made.partition = value
        value.readers[id(made)] = made
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch, and read what it needs."""
        first = args[0] if args else None
        if isinstance(first, UnreadTensor):
            value = first.partition
            if func in ALIASES:
                return UnreadTensor(value)
            if func == Tensor.to and len(args) == 1 and kwargs and not kwargs.keys() - {"dtype", "device"}:
                return convert(first, **kwargs)
            if func == Tensor.clone and len(args) == 1 and not kwargs and not first.requires_grad:
                return value.read()
        return call_with_wholes(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs lack the class method
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator on values, for callers that bypass `__torch_function__`."""
        read = pytree.tree_map(
            lambda item: item.partition.gather() if isinstance(item, UnreadTensor) else item, (args, dict(kwargs or {}))
        )
        return func(*read[0], **read[1])

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]  # the base class has an argument of PyTorch
        """Return the text of the value."""
        return repr(self.partition.gather())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain copy."""
        if id(self) not in memo:
            memo[id(self)] = make_plain(self, self.partition.read())
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as a plain tensor."""
        return make_plain(self, self.partition.read()).__reduce_ex__(protocol)


def make_plain(tensor: UnreadTensor, value: Tensor) -> Tensor:
    """Return a value as a plain tensor, or as a parameter if the unread tensor is one."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, tensor.requires_grad)
    return value.requires_grad_(tensor.requires_grad)


def convert(tensor: UnreadTensor, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """Return a tensor in another dtype or on another device, as `Tensor.to` does, without reading it."""
    value = tensor.partition
    wanted = dtype or value.dtype, torch.device(device) if device is not None else value.device
    if wanted == (value.dtype, value.device):
        return tensor
    if value.whole is not None:
        return value.whole.to(dtype=wanted[0], device=wanted[1])
    return UnreadTensor(StoredValue(ConvertedSource(value.source, *wanted), value.readers))


def settle(readers: Iterable[Tensor]) -> None:
    """Give unread tensors their values, one after the other, each together with those that share its memory.

    Args:
        readers: All unread tensors that are alive. Those that have become plain are passed over.
    """
    sharing: dict[StoredValue, list[UnreadTensor]] = {}
    for tensor in readers:
        if isinstance(tensor, UnreadTensor):
            sharing.setdefault(tensor.partition, []).append(tensor)
    for value, tensors in sharing.items():
        whole = value.gather()
        for item in tensors:
            become(item, whole.detach())
        value.whole = None
