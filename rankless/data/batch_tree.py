"""Batches as trees of dicts, tuples, lists, named tuples, dataclasses and PyTorch's pytree nodes."""

import copy
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from hashlib import blake2b
from typing import Any

import numpy
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES

from rankless.collectives.value_encoding import view_bytes

_COMPARED_BYTES = 1 << 16


class PerSampleValues:
    """A list or tuple with one plain value for each sample that this rank read: texts, paths, identifiers."""

    def __init__(self, values: list[Any] | tuple[Any, ...]) -> None:
        self.values = values


class LocalRows:
    """This rank's rows of a tensor that has one row per sample of the whole batch."""

    def __init__(self, local: Tensor) -> None:
        self.local = local


def map_leaves(
    function: Callable[[str, Any], Any],
    data: Any,
    path: str = "batch",
    *,
    is_leaf: Callable[[Any], bool] = lambda _: False,
) -> Any:
    """Return the same containers with `function(path, leaf)` in place of each leaf; the input stays unchanged."""
    if is_leaf(data) or not _is_container(data):
        return function(path, data)
    parts = {key: map_leaves(function, part, name, is_leaf=is_leaf) for key, (name, part) in _iterate_parts(data, path)}
    return _rebuild(data, parts)


def mark_per_sample_lists(data: Any, rows: int) -> Any:
    """Return the batch with each list of one plain value per sample wrapped in `PerSampleValues`."""

    def per_sample(part: Any) -> bool:
        return _is_list_of_plain_values(part) and len(part) == rows

    return map_leaves(lambda _, leaf: PerSampleValues(leaf) if per_sample(leaf) else leaf, data, is_leaf=per_sample)


def iterate_leaves(data: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its path, in order."""
    if not _is_container(data):
        yield path, data
    for _, (name, part) in _iterate_parts(data, path):
        yield from iterate_leaves(part, name)


def _is_list_of_plain_values(data: Any) -> bool:
    """Whether `data` is a list or tuple without tensors and containers, so perhaps one value per sample."""
    plain = type(data) in (list, tuple) and any(part is not None for part in data)
    return plain and not any(isinstance(part, Tensor) or _is_container(part) for part in data)


def _is_container(data: Any) -> bool:
    if isinstance(data, Mapping | list | tuple):
        return True
    return (dataclasses.is_dataclass(data) and not isinstance(data, type)) or type(data) in SUPPORTED_NODES


def _iterate_parts(data: Any, path: str) -> Iterator[tuple[Any, tuple[str, Any]]]:
    """Yield the parts of a container: key, path and value."""
    if isinstance(data, Mapping):
        yield from ((key, (f"{path}[{key!r}]", part)) for key, part in data.items())
    elif isinstance(data, list | tuple):
        yield from ((index, (f"{path}[{index}]", part)) for index, part in enumerate(data))
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = [field.name for field in dataclasses.fields(data)]
        yield from ((name, (f"{path}.{name}", getattr(data, name))) for name in names)
    elif type(data) in SUPPORTED_NODES:
        children, _ = SUPPORTED_NODES[type(data)].flatten_fn(data)
        yield from ((index, (f"{path}[{index}]", part)) for index, part in enumerate(children))


def _rebuild(data: Any, parts: dict[Any, Any]) -> Any:
    """Return a container like `data` with other parts."""
    kind = type(data)
    rebuilt: Any
    if isinstance(data, MutableMapping):
        rebuilt = copy.copy(data)
        for key, part in parts.items():
            rebuilt[key] = part
        return rebuilt
    if isinstance(data, Mapping):
        return kind(parts)  # as DataLoader itself does
    if isinstance(data, tuple) and hasattr(kind, "_make"):
        return kind._make(parts.values())
    if isinstance(data, list | tuple):
        return kind(parts.values())
    if dataclasses.is_dataclass(data):
        rebuilt = copy.copy(data)
        for name, part in parts.items():
            object.__setattr__(rebuilt, name, part)
        return rebuilt
    _, context = SUPPORTED_NODES[kind].flatten_fn(data)
    return SUPPORTED_NODES[kind].unflatten_fn(list(parts.values()), context)


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Return the same containers with `function(tensor)` in place of each tensor."""
    return map_leaves(lambda _, leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, data)


def count_rows(data: Any) -> int:
    """Return the rows of the first tensor of a batch that the data set made whole, or 0 without a tensor."""
    tensors = (leaf for _, leaf in iterate_leaves(data) if isinstance(leaf, Tensor) and leaf.dim() > 0)
    first = next(tensors, None)
    return 0 if first is None else first.shape[0]


def compute_digest(samples: Any) -> bytes:
    """Return a digest of samples. Tensors and arrays above 64 KiB are sampled, all else is digested whole."""
    digest = blake2b(digest_size=16)
    for path, leaf in iterate_leaves(samples, ""):
        digest.update(path.encode())
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {list(leaf.shape)} {_compute_checksum(leaf)}".encode())
        elif isinstance(leaf, numpy.ndarray) and not leaf.dtype.hasobject:
            digest.update(
                f"{leaf.dtype} {leaf.shape} {_compute_bytes_checksum(numpy.ascontiguousarray(leaf))}".encode()
            )
        elif isinstance(leaf, str | bytes | int | float | complex | numpy.generic):
            digest.update(repr(leaf).encode())
        else:
            digest.update(type(leaf).__qualname__.encode())
    return digest.digest()


def _compute_checksum(tensor: Tensor) -> int:
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return 0
    return _compute_bytes_checksum(view_bytes(tensor).numpy())


def _compute_bytes_checksum(array: Any) -> int:
    data = memoryview(array).cast("B") if array.size else memoryview(b"")
    if len(data) <= _COMPARED_BYTES:
        return zlib.crc32(data)
    checksum, stride = 0, len(data) // 16
    for start in range(0, len(data), stride):
        checksum = zlib.crc32(data[start : start + _COMPARED_BYTES // 16], checksum)
    return checksum
