"""Hypothesis strategies for the project's records."""

import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

_NUMBERS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(1, 2**31),
    float: st.floats(0, 1),
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    type(None): st.none(),
}


def values_of(kind: Any, texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a struct, or of a type of its fields, with texts of another strategy."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is str:
        return texts
    if kind in _NUMBERS:
        return _NUMBERS[kind]
    if kind in (Any, object):
        return texts | st.integers(0, 9)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: values_of(hints[name], texts) for name in kind.__struct_fields__})
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*(values_of(each, texts) for each in arguments))
    if origin in (tuple, list, frozenset, set):
        return st.lists(values_of(arguments[0], texts), max_size=2).map(origin)
    if origin is dict or origin is typing.get_origin(typing.Mapping[str, int]):
        return st.dictionaries(values_of(arguments[0], texts), values_of(arguments[1], texts), max_size=2)
    return st.one_of([values_of(each, texts) for each in arguments])
