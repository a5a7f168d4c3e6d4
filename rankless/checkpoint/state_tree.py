"""Convert an object's state to a tree of typed nodes and the tensors that it refers to, and back."""

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Mapping as AnyMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rankless.checkpoint.manifest import (
    Bytes,
    Mapping,
    Node,
    NumpyScalar,
    Sequence,
    SparseReference,
    SpecialFloat,
    TensorReference,
)
from rankless.checkpoint.tensor_file_writer import ELEMENT_CODES, STORED_AS
from rankless.errors import CheckpointError
from rankless.ownership.partitioned_tensor import find_partition, make_partitioned_tensor

WRITABLE = "dict, list, tuple, int, float, str, bool, None, bytes, tensors and numpy numbers, keyed by int or str"
TENSOR_CLASSES: tuple[type, ...] = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
MAX_DEPTH = 100
"""How deep a state may be nested. The parser has a limit of its own, not far above."""
NUMPY_DTYPE = re.compile(r"[<>|]?[biufc][0-9]{1,2}")
MAPPING_TYPES: dict[type, Any] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


class TreeWriter:
    """Turns states into nodes, and keeps the tensors that they refer to in `tensors`, not copied and not gathered."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._references: dict[tuple[object, ...], TensorReference] = {}

    def encode(self, value: object, path: tuple[str, ...]) -> Node:
        """Return the node of `value`, which is at `path`. Raises `CheckpointError` if it cannot be written."""
        kind = type(value)
        if len(path) > MAX_DEPTH:
            raise _unwritable_error(path[:4], f"values nested more than {MAX_DEPTH} deep")
        if value is None or kind in (bool, int, str):
            return value  # type: ignore[return-value]  # narrowed by its exact type
        if isinstance(value, Tensor):
            return self._sparse_tensor(value, path) if value.layout == torch.sparse_coo else self._tensor(value, path)
        if isinstance(value, np.generic):
            return self._numpy_scalar(value, path)
        if isinstance(value, float) and kind is float:
            return value if math.isfinite(value) else _special_float(value)
        if isinstance(value, bytes) and kind is bytes:
            return Bytes(value)
        if isinstance(value, list | tuple) and kind in (list, tuple):
            items = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
            return Sequence("list" if kind is list else "tuple", items)
        if isinstance(value, AnyMapping) and kind in MAPPING_TYPES:
            return self._mapping(value, path)
        if kind is np.ndarray:
            return self._array(value, path)  # type: ignore[arg-type]  # narrowed by its exact type
        raise _unwritable_error(path, f"{value!r:.80} of type {kind.__module__}.{kind.__qualname__}")

    def _mapping(self, value: AnyMapping[Any, object], path: tuple[str, ...]) -> Mapping:
        items: list[tuple[int | str, Node]] = []
        for key, item in value.items():
            if type(key) not in (int, str):
                raise _unwritable_error(path, f"the key {key!r:.80} of type {type(key).__name__}")
            items.append((key, self.encode(item, (*path, str(key)))))
        metadata = self.encode(getattr(value, "_metadata", None), (*path, "_metadata"))
        return Mapping(MAPPING_TYPES[type(value)], items, metadata)

    def _numpy_scalar(self, value: np.generic, path: tuple[str, ...]) -> NumpyScalar:
        if value.dtype.kind not in "biufc":
            raise _unwritable_error(path, f"a numpy scalar of dtype {value.dtype}")
        return NumpyScalar(value.dtype.str, value.tobytes())

    def _array(self, value: "np.ndarray[Any, Any]", path: tuple[str, ...]) -> TensorReference:
        try:
            tensor = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            raise _unwritable_error(path, f"a numpy array of dtype {value.dtype}") from error
        reference = self._tensor(tensor, path)
        return TensorReference(reference.name, reference.dtype, reference.shape, value.dtype.str)

    def _sparse_tensor(self, tensor: Tensor, path: tuple[str, ...]) -> SparseReference:
        indices, values = tensor.detach()._indices(), tensor.detach()._values()
        return SparseReference(
            self._tensor(indices, (*path, "indices")),
            self._tensor(values, (*path, "values")),
            tuple(tensor.shape),
            tensor.is_coalesced(),
        )

    def _tensor(self, tensor: Tensor, path: tuple[str, ...]) -> TensorReference:
        partition = find_partition(tensor)
        is_writable = partition is not None or type(tensor) in TENSOR_CLASSES
        if not is_writable or tensor.layout != torch.strided or tensor.is_meta:
            found = f"a {type(tensor).__name__} on {tensor.device} with layout {tensor.layout}"
            raise _unwritable_error(path, found)
        if tensor.dtype not in ELEMENT_CODES and tensor.dtype not in STORED_AS:
            raise _unwritable_error(path, f"a tensor of dtype {tensor.dtype}")
        identity = _identity(tensor) if partition is None else (id(partition),)
        known = self._references.get(identity)
        if known is not None and tensor.numel() > 0:
            return known
        name, number = ".".join(path), 1
        while name in self.tensors:
            number += 1
            name = f"{'.'.join(path)}#{number}"
        # The tensor stays alive here. Otherwise another tensor could get the address of a temporary one.
        self.tensors[name] = tensor.detach() if partition is None else tensor
        reference = TensorReference(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        self._references[identity] = reference
        return reference


def decode(node: Node, find: Callable[[str], Tensor]) -> Any:
    """Return the value of a node, with tensors in place of references.

    Args:
        node: The node.
        find: Returns the tensor of a name.
    """
    match node:
        case SpecialFloat(text):
            return float(text)
        case Bytes(data):
            return data
        case NumpyScalar(dtype, data):
            return _numpy_scalar(dtype, data)
        case TensorReference():
            return _resolve_reference(node, find)
        case SparseReference():
            return _resolve_sparse(node, find)
        case Sequence(kind, items):
            decoded = [decode(item, find) for item in items]
            return decoded if kind == "list" else tuple(decoded)
        case Mapping(kind, items, metadata):
            pairs = {key: decode(item, find) for key, item in items}
            if kind == "dict":
                return pairs
            mapping: Any = OrderedDict(pairs) if kind == "ordered" else Counter(pairs)
            if metadata is not None:
                mapping._metadata = decode(metadata, find)
            return mapping
    return node


def _resolve_reference(reference: TensorReference, find: Callable[[str], Tensor]) -> Any:
    """Return the tensor or numpy array of a reference."""
    tensor = find(reference.name)
    if reference.numpy is None:
        return tensor
    # A copy: the caller may write to it, and two references to one array become two arrays.
    return tensor.numpy().astype(_numpy_dtype(reference.numpy))


def _resolve_sparse(node: SparseReference, find: Callable[[str], Tensor]) -> Tensor:
    """Return the sparse tensor of a node. Its parts are read, because PyTorch checks the indices."""
    indices, values = (_resolve_reference(part, find).clone() for part in (node.indices, node.values))
    try:
        return torch.sparse_coo_tensor(
            indices, values, node.shape, device="cpu", is_coalesced=node.is_coalesced, check_invariants=True
        )
    except (RuntimeError, ValueError, OverflowError) as error:
        raise _damaged_manifest_error("a sparse tensor", str(error)) from error


def _special_float(value: float) -> SpecialFloat:
    if math.isnan(value):
        return SpecialFloat("nan")
    return SpecialFloat("inf" if value > 0 else "-inf")


def _numpy_scalar(dtype: str, data: bytes) -> Any:
    numbers = _numpy_dtype(dtype)
    if len(data) != numbers.itemsize:
        raise _damaged_manifest_error(f"the {numbers.itemsize} bytes of a numpy {dtype}", f"{len(data)} bytes")
    return np.frombuffer(data, dtype=numbers)[0]


def _numpy_dtype(text: str) -> "np.dtype[Any]":
    """Return the dtype of that name if it is one of plain numbers; numpy's others are objects and structures."""
    if NUMPY_DTYPE.fullmatch(text) is None:
        raise _damaged_manifest_error("a numpy dtype of numbers", f"{text!r:.80}")
    try:
        return np.dtype(text)
    except TypeError as error:
        raise _damaged_manifest_error("a numpy dtype of numbers", f"{text!r:.80}") from error


def _damaged_manifest_error(expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        expected=f"{expected}, in the manifest", found=found, fix="the checkpoint is damaged: load another one"
    )


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors with the same elements of the same memory."""
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _unwritable_error(path: tuple[str, ...], found: str) -> CheckpointError:
    return CheckpointError(
        expected=f"{'.'.join(path)} to be made of {WRITABLE}",
        found=found,
        fix="save such values, or an object's state_dict(); nothing is pickled",
    )


class DetachedWithoutGather(TorchFunctionMode):
    """Within the context, `detach()` and `.data` of divided tensors return divided ones, as for `state_dict()`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch."""
        is_detach = func in (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
        partition = find_partition(args[0]) if is_detach else None
        return func(*args, **(kwargs or {})) if partition is None else make_partitioned_tensor(partition)
