"""Print the doctor's results: a table per host, failures first, and a one-line verdict."""

import sys
from collections.abc import Sequence
from typing import TextIO

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rankless.records.doctor_records import CheckResult
from rankless.records.number_formatting import format_count

PLAIN_WIDTH = 120
"""Width of the table if the output is not a terminal."""
MAX_PAIR_ROWS = 24
"""With more pairs, the table combines the checks that passed."""
_ORDER = {"fail": 0, "warn": 1, "pass": 2}
_STYLES = {"fail": "bold red", "warn": "yellow", "pass": "green"}


class FailureCause(msgspec.Struct, frozen=True, kw_only=True):
    """One problem to fix, which may have failed several checks."""

    seen: str
    places: tuple[str, ...]
    fix: str


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of `rankless doctor`, without the fields that `--json` adds for all commands."""

    verdict: str
    causes: tuple[FailureCause, ...]
    warnings: int
    checks: int
    not_looked_at: tuple[str, ...]
    rows: tuple[CheckResult, ...]
    """By place; within a place, failures come first."""


def make_doctor_report(
    rows: Sequence[CheckResult], *, places: Sequence[str], not_looked_at: Sequence[str]
) -> DoctorReport:
    """Combine check results; `places` lists the hosts in their order, and pairs of hosts follow them."""
    known = [*places, *dict.fromkeys(row.place for row in rows if row.place not in places)]
    ordered = sorted(rows, key=lambda row: (known.index(row.place), _ORDER[row.status]))
    by_fix: dict[str, list[CheckResult]] = {}
    for row in ordered:
        if row.status == "fail":
            by_fix.setdefault(row.fix, []).append(row)
    causes = tuple(
        FailureCause(
            seen=f"{found[0].name}: {found[0].seen}",
            places=tuple(dict.fromkeys(row.place for row in found)),
            fix=fix,
        )
        for fix, found in by_fix.items()
    )
    warnings = sum(row.status == "warn" for row in rows)
    return DoctorReport(
        verdict=_format_verdict(causes, checks=len(rows), warnings=warnings),
        causes=causes,
        warnings=warnings,
        checks=len(rows),
        not_looked_at=tuple(not_looked_at),
        rows=tuple(ordered),
    )


def render_doctor_report(report: DoctorReport, file: TextIO | None = None) -> None:
    """Print a table for each place, those with failures first, then the verdict."""
    file = sys.stdout if file is None else file
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=PLAIN_WIDTH)
    with console.capture() as captured:
        _print_report(report, console)
    # Rich pads lines to the table's width.
    file.writelines(line.rstrip() + "\n" for line in captured.get().splitlines())


def _print_report(report: DoctorReport, console: Console) -> None:
    by_place: dict[str, list[CheckResult]] = {}
    for row in report.rows:
        by_place.setdefault(_section_of(row.place), []).append(row)
    name_width = max((len(row.name) for row in report.rows), default=0)
    for place, rows in sorted(by_place.items(), key=lambda item: min(_ORDER[row.status] for row in item[1]) > 0):
        console.print(Text(place, style="bold"))
        shown = _fold_passing_pairs(rows) if place == _PAIR_SECTION and len(rows) > MAX_PAIR_ROWS else rows
        console.print(_make_table(shown, name_width, shows_place=place == _PAIR_SECTION))
    for text in report.not_looked_at:
        console.print(f"not checked: {text}", soft_wrap=True, markup=False)
    console.print(Text(report.verdict, style="bold red" if report.causes else "bold green"), soft_wrap=True)
    for number, cause in enumerate(report.causes, start=1):
        console.print(f"  {number}. {', '.join(cause.places)}: {cause.seen}", soft_wrap=True, markup=False)
        console.print(f"     fix: {cause.fix}", soft_wrap=True, markup=False)


def _fold_passing_pairs(rows: Sequence[CheckResult]) -> list[CheckResult]:
    """Combine the passed checks of many pairs into one row per check; `--json` prints all rows."""
    passed: dict[str, list[CheckResult]] = {}
    for row in rows:
        if row.status == "pass" and row.place != "all hosts":
            passed.setdefault(row.name, []).append(row)
    folded = [
        msgspec.structs.replace(
            found[0], place=f"{len(found)} pairs", seen=f"for example {found[0].place}: {found[0].seen}"
        )
        for found in passed.values()
    ]
    return [*(row for row in rows if row.status != "pass" or row.place == "all hosts"), *folded]


_PAIR_SECTION = "between the hosts"


def _section_of(place: str) -> str:
    return _PAIR_SECTION if " → " in place or place == "all hosts" else place


def _make_table(rows: Sequence[CheckResult], name_width: int, *, shows_place: bool) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(width=6, no_wrap=True)
    if shows_place:
        table.add_column(no_wrap=True)
    table.add_column(min_width=name_width, no_wrap=True)
    table.add_column(overflow="fold")
    for row in sorted(rows, key=lambda row: _ORDER[row.status]):
        seen = Text(row.seen)
        if row.fix:
            seen.append(f"\nfix: {row.fix}", style="cyan")
        place = [Text(row.place)] if shows_place else []
        table.add_row(Text(f"  {row.status.upper()}", style=_STYLES[row.status]), *place, Text(row.name), seen)
    return table


def _format_verdict(causes: Sequence[FailureCause], *, checks: int, warnings: int) -> str:
    if causes:
        return f"{format_count(len(causes), 'cause')} found:"
    return f"healthy: {format_count(checks, 'check')}, {format_count(warnings, 'warning')}"
