"""Names of modules as text: one module, or the same module of repeated layers."""

import re
from collections.abc import Iterable, Sequence
from math import prod

SHOWN = 3
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def format_modules(modules: Iterable[tuple[str, str]]) -> str:
    """Return modules, given as path and class, as text; empty if there are none.

    Examples:
        >>> format_modules([("model.layers.0.norm", "LayerNorm"), ("model.layers.1.norm", "LayerNorm")])
        'model.layers.[0-1].norm (LayerNorm)'
    """
    groups: dict[tuple[str, str], list[Sequence[int]]] = {}
    for path, kind in dict.fromkeys(modules):
        if path:
            numbers = [int(text) for text in _NUMBER.findall(path)]
            groups.setdefault((_NUMBER.sub("{}", path), kind), []).append(numbers)
    texts = [f"{_fill_in(pattern, members)} ({kind})" for (pattern, kind), members in groups.items()]
    others = len(texts) - SHOWN
    return ", ".join(texts[:SHOWN]) + (f" and {others} more" if others > 0 else "")


def _fill_in(pattern: str, members: Sequence[Sequence[int]]) -> str:
    """Return the pattern of a path with the numbers of all its modules, or of one and how many more there are."""
    columns = [sorted(set(numbers)) for numbers in zip(*members, strict=True)]
    if prod(map(len, columns)) == len(members):
        return pattern.format(*map(format_numbers, columns))
    return f"{pattern.format(*members[0])} and {len(members) - 1} like it"


def format_numbers(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text: "3", "[0-5]" or "[0,2-4]"."""
    if len(numbers) == 1:
        return str(numbers[0])
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    texts = [f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]) for members in ranges]
    return f"[{','.join(texts)}]"
