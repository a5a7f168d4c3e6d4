"""Print the modules of a job's models, with what they hold and move, for `rankless plan`."""

from collections.abc import Iterator, Sequence

from rankless.records.module_groups import ModuleGroup
from rankless.records.quantities import format_decimal_bytes

WIDTH = 10
"""The least width of a column."""


def render_modules(groups: Sequence[ModuleGroup]) -> Iterator[str]:
    """Yield a row for each group under a title; nothing for a single group."""
    if len(groups) < 2:
        return
    totals = [group.sent_bytes for group in groups]
    axes = list(dict.fromkeys(axis for sent in totals for axis in sent))
    titles = ["parameters", *(f"sent along {axis}" for axis in axes)]
    yield "  ".join([*(f"{title:>{WIDTH}}" for title in titles), "module"])
    for group, sent in zip(groups, totals, strict=True):
        sizes = [group.parameter_bytes, *(sent.get(axis, 0) for axis in axes)]
        cells = [format_decimal_bytes(size) if size else "-" for size in sizes]
        columns = [f"{cell:>{max(WIDTH, len(title))}}" for cell, title in zip(cells, titles, strict=True)]
        yield "  ".join([*columns, group.label])
