"""The table of phases in the docs is the one from which the watchdog takes its limits."""

from pathlib import Path

from rankless.launch.watchdog.phase_timeouts import PHASES, STARTUP_STALL_SECONDS

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "watchdog.md"


def make_rows() -> list[tuple[str, str, str, str]]:
    """Return the table's rows: phase, which process may wait for which, how recognized, after how long."""
    rows = []
    for phase in PHASES:
        first = max(STARTUP_STALL_SECONDS, phase.least_seconds)
        later = "" if phase.least_seconds == first else f", after the first step {phase.least_seconds:g} s"
        rows.append((phase.title, phase.waits, phase.recognized_by, f"{first:g} s{later}"))
    return rows


def test_the_page_shows_the_table_of_the_watchdog():
    lines = PAGE.read_text().splitlines()
    header = lines.index(
        "| phase | which process may wait for which | how the watchdog recognizes it | reported after at least |"
    )
    rows = ["| " + " | ".join(row) + " |" for row in make_rows()]
    assert lines[header + 2 : header + 2 + len(rows) + 1] == [*rows, ""]
    assert len(rows) == len({phase.name for phase in PHASES})
