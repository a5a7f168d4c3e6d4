"""A job's program by the modules of its models: what they hold, move, and gather on every worker.

`rankless plan` prints and draws it. A run warns of the places where split values are gathered.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import msgspec

from rankless.records.job_programs import JobProgram, ProgramCommunication, ReplicatedOperator
from rankless.records.number_formatting import format_decimal_bytes, format_ranges

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
    return f"[{','.join(format_ranges(numbers))}]"


NOTICE_BYTES = 64 * 1024
"""Gathered bytes per step from which on a place is costly. Fewer cost little more than the message itself."""


class GatherPlace(msgspec.Struct, frozen=True, kw_only=True):
    """An operator at a line of the script that every worker computes on whole values which were split before."""

    line: str
    operator: str
    backward: bool
    """Whether it belongs to the computation of gradients."""
    modules: str
    """The modules that need the values, as "model.layers.[0-2] (LayerNorm)". Empty outside of modules."""
    values: int
    """How many values are gathered per call."""
    bytes: int
    """Their size per optimizer step."""
    has_rule: bool
    """Whether the operator has a sharding rule, which does not fit the values' placements."""
    is_costly: bool
    """Whether a run warns of it: it has no rule, or gathers at least 64 KiB per step."""


def list_gather_places(program: JobProgram) -> tuple[GatherPlace, ...]:
    """Return the places of a program where operators compute in full with gathered inputs, in program order.

    Operators without a rule are listed even if another operator has gathered their inputs already.
    """
    moves: dict[tuple[str, str, bool], list[ProgramCommunication]] = {}
    for move in program.moves:
        if move.in_full:
            moves.setdefault((move.line, move.reason.removeprefix("input of "), move.backward), []).append(move)
    without_rule: dict[tuple[str, str], list[ReplicatedOperator]] = {}
    for item in program.without_rule:
        without_rule.setdefault((item.line, item.name), []).append(item)
    places = [
        _make_place(key, found, calls=program.calls_per_step, has_rule=key[:2] not in without_rule)
        for key, found in moves.items()
    ]
    reached = {key[:2] for key in moves}
    for (line, name), items in without_rule.items():
        if (line, name) not in reached:
            places.append(_make_place((line, name, False), items, calls=0, has_rule=False))
    return tuple(places)


def describe_gather_place(place: GatherPlace) -> str:
    """Return what a place gathers and why, without its line."""
    direction = " in backward" if place.backward else ""
    modules = f" of {place.modules}" if place.modules else ""
    size = f"gathers {format_decimal_bytes(place.bytes)} per step" if place.values else "takes gathered values"
    reason = "its rule does not fit how they are split" if place.has_rule else "it has no sharding rule"
    return f"{place.operator}{modules}{direction} {size}: {reason}"


def _make_place(
    key: tuple[str, str, bool],
    found: Iterable[ProgramCommunication | ReplicatedOperator],
    *,
    calls: int,
    has_rule: bool,
) -> GatherPlace:
    line, operator, backward = key
    members = list(found)
    size = calls * sum(item.bytes for item in members if isinstance(item, ProgramCommunication))
    return GatherPlace(
        line=line,
        operator=operator,
        backward=backward,
        modules=format_modules(_iterate_modules(members)),
        values=sum(isinstance(item, ProgramCommunication) for item in members),
        bytes=size,
        has_rule=has_rule,
        is_costly=not has_rule or size >= NOTICE_BYTES,
    )


def _iterate_modules(items: Iterable[ProgramCommunication | ReplicatedOperator]) -> Iterator[tuple[str, str]]:
    for item in items:
        if item.module:
            yield item.module, item.module_type
