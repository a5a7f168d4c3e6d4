"""Encodes records, messages and settings as MessagePack or JSON, whatever text they hold.

Both formats hold text in UTF-8, and a Python string may hold what has no form there: `os.fsdecode` makes lone
surrogates of the bytes of a file name that is not UTF-8, and an error message may quote that name. The record of such
an error must arrive, because it names the root cause of a failure. Here such characters become escapes, as Python's
standard error has them: "caf\\udce9.png". An architecture test lists the other callers of msgspec's encoders, with the
reason of each.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

_MSGPACK = msgspec.msgpack.Encoder()
_JSON = msgspec.json.Encoder()
_MIDDLE = " … "


def encode_msgpack(value: Any, *, encoder: msgspec.msgpack.Encoder = _MSGPACK) -> bytes:
    """Return a value as MessagePack. Raises `TypeError` for a type that it does not have."""
    try:
        return encoder.encode(value)
    except UnicodeEncodeError:
        kept = (bytes, bytearray, memoryview)
        plain = msgspec.to_builtins(value, builtin_types=kept, enc_hook=encoder.enc_hook, order=encoder.order)
        return encoder.encode(_map_text(plain, _escape))


def encode_json(value: Any) -> bytes:
    """Return a value as JSON. Raises `TypeError` for a type that it does not have."""
    try:
        return _JSON.encode(value)
    except UnicodeEncodeError:
        return _JSON.encode(_map_text(msgspec.to_builtins(value, str_keys=True), _escape))


def encode_bounded_msgpack(value: Any, *, max_bytes: int) -> bytes:
    """Return a value as at most about `max_bytes` of MessagePack: if it is longer, its texts lose their middles."""
    data = encode_msgpack(value)
    if len(data) <= max_bytes:
        return data
    plain = msgspec.to_builtins(value, builtin_types=(bytes,))
    # A text of n characters has at most 6 n bytes, and a header of at most 5.
    longest = max(0, max_bytes // max(1, sum(1 for _ in _texts(plain))) - 5) // 6
    return _MSGPACK.encode(_map_text(plain, lambda text: _escape(_cut_middle(text, longest))))


def _escape(text: str) -> str:
    """Return a text with escapes for the characters that UTF-8 does not have."""
    return text.encode(errors="backslashreplace").decode()


def _cut_middle(text: str, longest: int) -> str:
    """Return a text of at most `longest` characters: its start and its end. A traceback has its cause at the end."""
    if len(text) <= longest:
        return text
    start, end = divmod(max(0, longest - len(_MIDDLE)), 2)
    return (text[:start] + _MIDDLE + text[len(text) - start - end :])[:longest]


def _texts(plain: Any) -> Iterator[str]:
    if isinstance(plain, str):
        yield plain
    elif isinstance(plain, dict):
        for key, item in plain.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(plain, list | tuple):
        for item in plain:
            yield from _texts(item)


def _map_text(plain: Any, change: Callable[[str], str]) -> Any:
    """Return builtin data with all its texts changed."""
    if isinstance(plain, str):
        return change(plain)
    if isinstance(plain, dict):
        return {_map_text(key, change): _map_text(item, change) for key, item in plain.items()}
    if isinstance(plain, list | tuple):
        return type(plain)(_map_text(item, change) for item in plain)
    return plain
