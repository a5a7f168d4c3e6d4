"""The tables of `rankless verify` as text: what was compared, and how far it was from its limits."""

from collections.abc import Sequence

from rankless.verify.comparison import TableRow

HEADERS = ("compared", "number", "largest difference", "noise floor", "nearest to its limit")


def render_table(rows: Sequence[TableRow]) -> str:
    """Return the table of comparisons, in columns."""
    lines = [HEADERS, *(_make_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADERS))]
    rendered = []
    for name, *numbers, nearest in lines:
        middle = "  ".join(cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True))
        rendered.append(f"{name.ljust(widths[0])}  {middle}  {nearest}".rstrip())
    return "\n".join(rendered)


def _make_cells(row: TableRow) -> tuple[str, ...]:
    noise = "" if row.noise is None else f"{row.noise:.2g}"
    return (row.name, f"{row.compared:,}", f"{row.largest:.2g}", noise, _format_nearest(row))


def _format_nearest(row: TableRow) -> str:
    worst = row.worst
    if worst is None or worst.size == 0:
        return "all equal" if row.compared else "nothing to compare"
    return f"{worst.tensor}, step {worst.location.step}: {worst.size:.2g} of {row.worst_allowed:.2g}"
