"""Run one benchmark or all, print a table, and write the rows to a file on request."""

import argparse
import importlib
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.pairs import Row

MODULES = {
    "step": "step",
    "divided_states": "divided_states",
    "pipelines": "pipelines",
    "tensor_parallel": "tensor_parallel",
    "overhead": "overhead",
    "logical": "logical",
    "capture": "capture",
    "start": "start",
    "start_hosts": "start_hosts",
    "first_result": "first_result",
    "help": "help_text",
    "save_stall": "save_stall",
    "resume": "resume",
    "checks": "checks",
    "variable_shapes": "variable_shapes",
    "collectives": "collectives",
    "host_collectives": "host_collectives",
    "hang_watch": "hang_watch",
    "recovery": "recovery",
    "tables": "tables",
    "table_servers": "table_servers",
    "early_rows": "early_rows",
    "horovod": "horovod",
    "horovod_hosts": "horovod_hosts",
    "verify_cost": "verify_cost",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODULES)}; all if none is given")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(MODULES)
    if unknown:
        parser.error(f"no benchmark called {', '.join(sorted(unknown))}; there are {', '.join(MODULES)}")
    console = Console(highlight=False, width=120)
    rows: list[Row] = []
    for name in arguments.names or MODULES:
        for row in importlib.import_module(f"bench.{MODULES[name]}").rows():
            console.print(f"[dim]{row.name}: {row.ratio:.3f}[/dim]")
            rows.append(row)
    console.print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def table(rows: list[Row]) -> Table:
    shown = Table("benchmark", "peer", "ours", "peer's", "ours - peer's", "ratio", "spread", "aim", "runs")
    for row in rows:
        shown.add_row(
            row.name,
            row.peer,
            format_seconds(row.ours_seconds),
            format_seconds(row.peer_seconds),
            format_seconds(row.extra_seconds, sign="+"),
            f"{row.ratio:.3f}",
            f"{row.spread:.3f}",
            format_aim(row),
            str(row.runs),
        )
    return shown


def format_seconds(seconds: float, *, sign: str = "") -> str:
    """Return a time in a unit that shows its digits."""
    unit, factor = ("s", 1) if abs(seconds) >= 0.1 else ("ms", 1e3) if abs(seconds) >= 1e-4 else ("µs", 1e6)
    return f"{seconds * factor:{sign}.2f} {unit}"


def format_aim(row: Row) -> str:
    """Return the largest acceptable ratio, or the largest acceptable difference."""
    if row.extra_aim is not None:
        return format_seconds(row.extra_aim, sign="+")
    return "" if row.aim is None else f"{row.aim:.2f}"


if __name__ == "__main__":
    main()
