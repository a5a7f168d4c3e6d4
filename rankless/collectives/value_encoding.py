"""Convert Python values to bytes and back, for messages between the ranks of one script, without pickle.

Numbers, text, bytes, None, tuples, lists, sets, dicts, tensors, NumPy arrays and numbers, paths, dates, enums, named
tuples, dataclasses and msgspec structs keep their types. A class is sent as module and name. The receiver looks it up
among the modules that it has imported. It imports nothing, and runs no code but the plain construction of the object.
"""

import dataclasses
import datetime
import enum
import pathlib
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy
import torch
from torch import Tensor

_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_DATES: dict[type, str] = {
    datetime.datetime: "datetime",
    datetime.date: "date",
    datetime.time: "time",
}
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1


def encode_value(value: object) -> bytes:
    """Return a value as bytes. Raises `TypeError`, which names the type, for a value without a typed form."""
    return msgspec.msgpack.encode(_pack(value))


def decode_value(data: bytes) -> Any:
    """Return the value of bytes that `encode_value` made."""
    return _unpack(msgspec.msgpack.decode(data))


def _pack(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is str:
        return value if value.isascii() or _is_utf8(value) else ["text", value.encode(errors="surrogatepass")]
    if kind is int:
        return value if _SMALLEST <= value <= _LARGEST else ["int", hex(value)]
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], *map(_pack, value)]
    if kind in _MAPPINGS:
        return [_MAPPINGS[kind], *([_pack(key), _pack(item)] for key, item in value.items())]
    if isinstance(value, Tensor):
        return _pack_tensor(value)
    if isinstance(value, numpy.ndarray | numpy.generic) and not value.dtype.hasobject:
        name = "array" if isinstance(value, numpy.ndarray) else "numpy"
        return [name, value.dtype.str, list(value.shape), value.tobytes()]
    if kind in _DATES:
        return [_DATES[kind], value.isoformat()]
    if kind is datetime.timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if isinstance(value, pathlib.PurePath):
        return ["path", _pack(str(value))]
    if kind in (complex, range, slice):
        parts = (value.real, value.imag) if kind is complex else (value.start, value.stop, value.step)
        return [kind.__name__, *map(_pack, parts)]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(value).removeprefix("torch.")]
    return _pack_object(value)


def _is_utf8(text: str) -> bool:
    """Whether a text has a form in UTF-8. The names of files that are not UTF-8 have none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def view_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as flat bytes: a view, if it lies in memory without gaps.

    A column of one row has any stride, at which PyTorch gives no view; so the elements get a dim of their own.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.unsqueeze(-1).view(torch.uint8).reshape(-1)


def _pack_tensor(tensor: Tensor) -> list[Any]:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"a tensor on {tensor.device} with layout {tensor.layout}")
    data = view_bytes(tensor.cpu()).numpy().tobytes()
    return ["tensor", str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data, tensor.requires_grad]


def _pack_object(value: Any) -> list[Any]:
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    packed: list[Any]
    if isinstance(value, enum.Enum):
        packed = ["enum", name, value.name]
    elif isinstance(value, tuple) and hasattr(kind, "_make"):
        packed = ["named", name, *map(_pack, value)]
    elif dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        packed = ["data", name, *([field, _pack(getattr(value, field))] for field in fields)]
    elif isinstance(value, msgspec.Struct):
        packed = ["struct", name, *([field, _pack(getattr(value, field))] for field in kind.__struct_fields__)]
    else:
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__}")
    if "<" in name or _find_class(name) is not kind:
        raise TypeError(f"{name}, a class that is not defined at the top of its module")
    return packed


def _find_class(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _unpack(packed: Any) -> Any:
    return _READERS[packed[0]](packed[1:]) if type(packed) is list else packed


def _array(parts: list[Any]) -> Any:
    dtype, shape, data = parts
    return numpy.frombuffer(bytearray(data), dtype=numpy.dtype(dtype)).reshape(shape)


def _tensor(parts: list[Any]) -> Tensor:
    name, shape, data, requires_grad = parts
    dtype = getattr(torch, name)
    flat = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        if data
        else torch.empty(0, dtype=dtype, device="cpu")
    )
    return flat.reshape(shape).requires_grad_(requires_grad)


def _dataclass(parts: list[Any]) -> Any:
    kind = _find_class(parts[0])
    instance = object.__new__(kind)
    for field, value in parts[1:]:
        object.__setattr__(instance, field, _unpack(value))  # works for frozen classes, and skips __post_init__
    return instance


def _struct(parts: list[Any]) -> Any:
    return _find_class(parts[0])(**{field: _unpack(value) for field, value in parts[1:]})


def _items(parts: list[Any]) -> list[Any]:
    return [_unpack(part) for part in parts]


def _pairs(parts: list[Any]) -> list[tuple[Any, Any]]:
    return [(_unpack(key), _unpack(item)) for key, item in parts]


_READERS: dict[str, Callable[[list[Any]], Any]] = {
    "int": lambda parts: int(parts[0], 16),
    "text": lambda parts: parts[0].decode(errors="surrogatepass"),
    "list": _items,
    "tuple": lambda parts: tuple(_items(parts)),
    "set": lambda parts: set(_items(parts)),
    "frozenset": lambda parts: frozenset(_items(parts)),
    "size": lambda parts: torch.Size(parts),
    "dict": lambda parts: dict(_pairs(parts)),
    "ordered": lambda parts: OrderedDict(_pairs(parts)),
    "counter": lambda parts: Counter(dict(_pairs(parts))),
    "tensor": _tensor,
    "array": _array,
    "numpy": lambda parts: _array(parts)[()],
    "datetime": lambda parts: datetime.datetime.fromisoformat(parts[0]),
    "date": lambda parts: datetime.date.fromisoformat(parts[0]),
    "time": lambda parts: datetime.time.fromisoformat(parts[0]),
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "path": lambda parts: pathlib.Path(_unpack(parts[0])),
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "slice": lambda parts: slice(*_items(parts)),
    "dtype": lambda parts: getattr(torch, parts[0]),
    "device": lambda parts: torch.device(parts[0]),
    "enum": lambda parts: _find_class(parts[0])[parts[1]],
    "named": lambda parts: _find_class(parts[0])._make(_items(parts[1:])),
    "data": _dataclass,
    "struct": _struct,
}
