"""Write docs/faults.md from the rows of the fault tests, at the end of `make soak`."""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

HEAD = """# Faults

This page lists faults of a job, and how each job ends. The time is in seconds until no process of the job is alive
on any host, the longest of the cases. A case is right if the report on the terminal names the root cause, its host
and its exit code. Each fault runs with 1, 2 and 4 workers per host, on one host and, where it applies, on two
(network namespaces). The goal is 2 s, 5 s if a host sends nothing, and 2 s after `--hang-timeout` if the ranks make
no progress. The tests are [tests/launch/test_faults.py](../tests/launch/test_faults.py) and, for faults that keep a
job from starting, [tests/launch/test_faults_at_start.py](../tests/launch/test_faults_at_start.py). Times there
count from the command.
"""


def page(rows: Sequence[Row], tested: str) -> str:
    """Render the page."""
    running = [row for row in rows if row.get("phase") != "start"]
    right = sum(row["is_right"] for row in rows)
    late = sum(row["seconds"] > row["goal"] for row in rows)
    lines = [
        HEAD,
        f"Run of {datetime.now(UTC):%Y-%m-%d} at commit {tested}: {len(rows)} cases of "
        f"{len({row['fault'] for row in rows})} faults; root cause right in {right}; median "
        f"{statistics.median(row['seconds'] for row in running):.2f} s; slower than the goal {late}; leftover "
        f"processes {sum(row['orphans'] for row in rows)}.",
        "",
        "| fault | hosts | cases | longest, s | goal, s | root cause right | lines | leftover processes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fault, hosts in dict.fromkeys((row["fault"], row["hosts"]) for row in rows):
        cases = [row for row in rows if (row["fault"], row["hosts"]) == (fault, hosts)]
        cells = [
            fault,
            hosts,
            len(cases),
            f"{max(row['seconds'] for row in cases):.2f}",
            f"{cases[0]['goal']:g}",
            f"{sum(row['is_right'] for row in cases)} of {len(cases)}",
            max(row["lines"] for row in cases),
            sum(row["orphans"] for row in cases),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, ""])


def write_page(rows_file: Path, tested: str) -> None:
    """Write docs/faults.md. If a case ran several times, its last row counts."""
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    latest = {(row["fault"], row["hosts"], row["workers"]): row for row in rows}
    (Path(__file__).parents[2] / "docs" / "faults.md").write_text(page(list(latest.values()), tested))


if __name__ == "__main__":
    write_page(Path(sys.argv[1]), sys.argv[2])
