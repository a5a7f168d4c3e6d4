"""The results of a job: take their tensors out of any structure, and put others in their place.

PyTorch's pytrees know tuples, lists, dicts and named tuples. A job may also return dataclasses, classes of `attrs`, and
other objects that hold tensors, such as a distribution. Each call returns a new object.
"""

import enum
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

MAX_DEPTH = 16
"""How many objects within objects are looked into."""
NOT_RESULTS = (
    *(type, enum.Enum, str, bytes, int, float, complex),
    *(types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(Tensor, nn.Module, torch.optim.Optimizer, torch.Generator),
)
"""Objects that a job returns as they are."""
HEAP_TYPE = 1 << 9
"""The flag of classes that are defined in Python."""


@dataclass(frozen=True)
class ObjectStructure:
    """An object without its tensors: its class, and the structure of its items and attributes."""

    kind: type
    content: "ResultStructure"

    def build(self, leaves: Iterator[Any]) -> Any:
        """Return a new object. No Python code of its class runs."""
        items, attributes = self.content.build(leaves)
        base: Any = next(base for base in self.kind.__mro__ if not base.__flags__ & HEAP_TYPE)
        made = base.__new__(self.kind, items) if base in (tuple, frozenset) else base.__new__(self.kind)
        if base is list:
            list.extend(made, items)
        elif issubclass(base, dict | set):
            base.update(made, items)
        for name, value in attributes.items():
            object.__setattr__(made, name, value)
        return made


@dataclass(frozen=True)
class ResultStructure:
    """The structure of a result: that of pytrees, and of the objects among its leaves."""

    spec: pytree.TreeSpec
    objects: tuple[ObjectStructure | None, ...]

    def build(self, leaves: Iterable[Any]) -> Any:
        """Return a result with these leaves."""
        remaining = iter(leaves)
        found = [next(remaining) if item is None else item.build(remaining) for item in self.objects]
        return pytree.tree_unflatten(found, self.spec)

    def __str__(self) -> str:
        kinds = [item.kind.__qualname__ + str(item.content) for item in self.objects if item is not None]
        return f"{self.spec}{' '.join(kinds)}"


def flatten_result(result: Any) -> tuple[list[Any], ResultStructure]:
    """Return the tensors and plain values of a result, and its structure."""
    return _flatten(result, ())


def map_result(function: Callable[[Any], Any], result: Any) -> Any:
    """Return a result of the same structure with what a function returns for each tensor and plain value."""
    leaves, structure = flatten_result(result)
    return structure.build(map(function, leaves))


def list_named_leaves(result: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values of a result, each with the way to it, such as "['out'].logits"."""
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        name = prefix + pytree.keystr(path)
        if _flatten_object(leaf, ()) is None:
            yield name, leaf
            continue
        items, attributes = _list_content(leaf) or ((), {})
        yield from list_named_leaves(items, name)
        for attribute, value in attributes.items():
            yield from list_named_leaves(value, f"{name}.{attribute}")


def _flatten(value: Any, parents: tuple[int, ...]) -> tuple[list[Any], ResultStructure]:
    leaves, spec = pytree.tree_flatten(value)
    found: list[list[Any]] = []
    objects: list[ObjectStructure | None] = []
    for leaf in leaves:
        known = _flatten_object(leaf, parents)
        found.append([leaf] if known is None else known[0])
        objects.append(None if known is None else known[1])
    return list(chain.from_iterable(found)), ResultStructure(spec, tuple(objects))


def _flatten_object(value: Any, parents: tuple[int, ...]) -> tuple[list[Any], ObjectStructure] | None:
    """Return the content of an object that is taken apart; None for another one."""
    content = _list_content(value)
    if content is None or id(value) in parents or len(parents) == MAX_DEPTH:
        return None
    leaves, structure = _flatten(content, (*parents, id(value)))
    is_record = is_dataclass(value) or hasattr(value, "__attrs_attrs__") or isinstance(value, types.SimpleNamespace)
    if not is_record and not any(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    return leaves, ObjectStructure(type(value), structure)


def _list_content(value: Any) -> tuple[Any, dict[str, Any]] | None:
    """Return the items and the attributes of an object; None if it has none, or is no result."""
    if value is None or isinstance(value, NOT_RESULTS):
        return None
    attributes = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, private):
                attributes[private] = getattr(value, private)
    items: Any = ()
    if isinstance(value, dict):
        items = dict(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = list(value)
    return (items, attributes) if attributes or items else None


@dataclass(frozen=True)
class LiveResult:
    """A result that shares memory with a parameter or buffer, so that it has the values after the step and later.

    Sizes may be symbols. `offset` counts from the first element of the parameter or buffer.
    """

    name: str
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    whole_stride: tuple[Any, ...]
    """The strides of the parameter or buffer in the trace."""

    def read(self, tensor: Tensor, computed: Tensor, evaluate: Callable[[Any], Any]) -> Tensor:
        """Return the result.

        Args:
            tensor: The parameter or buffer. If it is divided between workers, they gather it here.
            computed: What the program has computed, for a tensor that lies in memory in another order.
            evaluate: Returns the number for a size.
        """
        live = tensor.detach()
        size, stride = tuple(map(evaluate, self.size)), tuple(map(evaluate, self.stride))
        if tuple(live.shape) == size and live.stride() == stride:
            return live
        if live.stride() != tuple(map(evaluate, self.whole_stride)):
            return computed
        return live.as_strided(size, stride, live.storage_offset() + evaluate(self.offset))


def find_live(leaf: Tensor, states: Mapping[int, tuple[str, Tensor]]) -> LiveResult | None:
    """Return how a result shares memory with a parameter or buffer; None if it does not.

    Args:
        leaf: The result in the trace.
        states: The name and the traced tensor of each parameter and buffer by its memory.
    """
    memory = get_memory(leaf)
    if memory is None or memory not in states:
        return None
    name, state = states[memory]
    if (leaf.dtype, leaf.is_conj(), leaf.is_neg()) != (state.dtype, state.is_conj(), state.is_neg()):
        return None
    offset = leaf.storage_offset() - state.storage_offset()
    return LiveResult(name, tuple(leaf.shape), tuple(leaf.stride()), offset, tuple(state.stride()))


def get_memory(tensor: Tensor) -> int | None:
    """Return what tells the memory of a tensor from others; None for a sparse tensor, which has several."""
    if tensor.layout != torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)
