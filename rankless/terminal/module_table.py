"""Group what a job's program holds and moves by the modules of its models, for `rankless plan`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rankless.records.job_programs import JobProgram
from rankless.records.quantities import format_decimal_bytes
from rankless.records.repeated_layer_names import format_numbers

OUTSIDE = "outside of modules"
WIDTH = 10
"""The least width of a column."""
DEPTH = 2
"""The components of a path without numbered layers that name a group, as "model.head"."""


@dataclass
class ModuleGroup:
    """A module of a job's models, or repeated layers."""

    name: str
    numbers: set[int] = field(default_factory=set)
    """The numbers of repeated layers."""
    parameter_bytes: int = 0
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """What each worker sends per call, by axis of the mesh."""

    @property
    def label(self) -> str:
        """The name with the numbers of its layers, as "model.layers.[0-3]"."""
        return f"{self.name}.{format_numbers(sorted(self.numbers))}" if self.numbers else self.name


def group_by_module(program: JobProgram) -> list[ModuleGroup]:
    """Return the modules of a program, in the order of their parameters."""
    groups: dict[str, ModuleGroup] = {}
    sizes = {item.name: item.bytes for item in program.inputs if item.kind == "parameter"}
    for name, size in sizes.items():
        find_group(groups, get_module(name)).parameter_bytes += size
    for move in program.moves:
        moved = {name: sizes.get(name, 0) for name in move.value.split(", ")}
        total = sum(moved.values()) if all(name in sizes for name in moved) else 0
        if total == 0:
            add_sent(find_group(groups, move.module), move.axis, move.sent_bytes)
            continue
        for name, size in moved.items():  # gradients, or parameters that are gathered
            add_sent(find_group(groups, get_module(name)), move.axis, move.sent_bytes * size // total)
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


def add_sent(group: ModuleGroup, axis: str, size: int) -> None:
    """Add bytes that are sent along an axis."""
    group.sent_bytes[axis] = group.sent_bytes.get(axis, 0) + size


def render_modules(groups: Sequence[ModuleGroup]) -> Iterator[str]:
    """Yield a row for each group under a title; nothing for a single group."""
    if len(groups) < 2:
        return
    axes = list(dict.fromkeys(axis for group in groups for axis in group.sent_bytes))
    titles = ["parameters", *(f"sent along {axis}" for axis in axes)]
    yield "  ".join([*(f"{title:>{WIDTH}}" for title in titles), "module"])
    for group in groups:
        sizes = [group.parameter_bytes, *(group.sent_bytes.get(axis, 0) for axis in axes)]
        cells = [format_decimal_bytes(size) if size else "-" for size in sizes]
        columns = [f"{cell:>{max(WIDTH, len(title))}}" for cell, title in zip(cells, titles, strict=True)]
        yield "  ".join([*columns, group.label])
