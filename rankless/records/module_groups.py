"""What a job's program holds and moves, grouped by the modules of its models: what `rankless plan` prints and draws."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from rankless.records.job_programs import JobProgram, ProgramCommunication

OUTSIDE = "outside of modules"
DEPTH = 2
"""The components of a path without numbered layers that name a group, as "model.head"."""


@dataclass(frozen=True)
class ModuleMove:
    """The part of a move that belongs to a module: of gradients that move together, its own."""

    move: ProgramCommunication
    bytes: int
    sent_bytes: int


@dataclass
class ModuleGroup:
    """A module of a job's models, or repeated layers."""

    name: str
    numbers: set[int] = field(default_factory=set)
    """The numbers of repeated layers."""
    parameters: dict[str, int] = field(default_factory=dict)
    """The bytes of each parameter."""
    moves: list[ModuleMove] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name with the numbers of its layers, as "model.layers.[0-3]"."""
        return f"{self.name}.{format_numbers(sorted(self.numbers))}" if self.numbers else self.name

    @property
    def parameter_bytes(self) -> int:
        """The size of its parameters."""
        return sum(self.parameters.values())

    @property
    def sent_bytes(self) -> dict[str, int]:
        """What each worker sends per call, by axis of the mesh."""
        sizes: dict[str, int] = {}
        for part in self.moves:
            sizes[part.move.axis] = sizes.get(part.move.axis, 0) + part.sent_bytes
        return sizes


def group_by_module(program: JobProgram) -> list[ModuleGroup]:
    """Return the modules of a program, in the order of their parameters."""
    groups: dict[str, ModuleGroup] = {}
    sizes = {item.name: item.bytes for item in program.inputs if item.kind == "parameter"}
    for name, size in sizes.items():
        find_group(groups, get_module(name)).parameters[name] = size
    for move in program.moves:
        moved = {name: sizes.get(name, 0) for name in move.value.split(", ")}
        total = sum(moved.values()) if all(name in sizes for name in moved) else 0
        if total == 0:
            find_group(groups, move.module).moves.append(ModuleMove(move, move.bytes, move.sent_bytes))
            continue
        shares: dict[str, list[int]] = {}
        for name, size in moved.items():  # gradients, or parameters that are gathered
            share = shares.setdefault(find_group(groups, get_module(name)).name, [0, 0])
            share[0] += move.bytes * size // total
            share[1] += move.sent_bytes * size // total
        for group, (size, sent) in shares.items():
            groups[group].moves.append(ModuleMove(move, size, sent))
    return list(groups.values())


def get_module(name: str) -> str:
    """Return the path of the module that has a parameter."""
    return name.rpartition(".")[0]


def find_group(groups: dict[str, ModuleGroup], path: str) -> ModuleGroup:
    """Return the group of a module, which may be new."""
    parts = path.split(".") if path else [OUTSIDE]
    place = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    name = ".".join(parts[:DEPTH] if place is None else parts[:place])
    group = groups.setdefault(name, ModuleGroup(name))
    if place is not None:
        group.numbers.add(int(parts[place]))
    return group


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
