"""Everything, also what CI leaves out: `make soak`. Resumable: a file of tests that has passed at this commit is not
run again. The result goes to docs/soak.md, with the commit and the raw counts.

Several files run at a time, as most of a test's time is one process waiting for another; those whose times are
published, the faults, run after them, one by one.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from support.fault_page import write_page

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".soak"
LANES = 3
FILE_SECONDS = 2 * 3600.0
PUBLISHED = ("tests/launch/test_faults.py", "tests/launch/test_faults_at_start.py")
Counts = dict[str, float]


def commit() -> str:
    """The commit that is tested. Tests of what nobody else can have are worth nothing: all must be committed."""
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    if changed.stdout.strip():
        sys.exit(
            "expected: everything committed, so that the result says what it covers\nfound:    changes; commit them"
        )
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return head.stdout.strip()


def run(file: Path, faults: Path) -> Counts:
    """The counts of one file of tests, every marker included; tests of faults add their rows to `faults`. A file that
    comes to no end is ended, and has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder) / "report.xml", Path(folder) / "output.txt"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "exhaustive or not exhaustive", f"--junitxml={report}"]
        start = time.monotonic()
        environment = {**os.environ, "FAULTS_JSON": str(faults)}
        with output.open("w") as text, suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [*command, str(file)],
                cwd=ROOT,
                env=environment,
                stdout=text,
                stderr=subprocess.STDOUT,
                timeout=FILE_SECONDS,
            )
        seconds = round(time.monotonic() - start, 1)
        counts = counted(report) if report.exists() else {"tests": 1, "failed": 1, "skipped": 0}
        if counts["failed"]:
            print(output.read_text(errors="replace")[-4000:], flush=True)
    return counts | {"seconds": seconds}


def counted(report: Path) -> Counts:
    """Tests, failures and skips in pytest's report."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    return {"tests": total["tests"], "failed": total["failures"] + total["errors"], "skipped": total["skipped"]}


def page(tested: str, results: dict[str, Counts]) -> str:
    """The result as a page."""
    folders: dict[str, Counts] = {}
    for name, counts in results.items():
        folder = folders.setdefault(str(Path(name).parent), dict.fromkeys(("tests", "failed", "skipped", "seconds"), 0))
        for key in folder:
            folder[key] += counts[key]
    rows = [
        f"| {name} | " + " | ".join(f"{value:g}" for value in counts.values()) + " |"
        for name, counts in folders.items()
    ]
    total = [
        f"{sum(counts[key] for counts in results.values()):g}" for key in ("tests", "failed", "skipped", "seconds")
    ]
    failed = [
        f"- {name}: {counts['failed']:g} of {counts['tests']:g} failed"
        for name, counts in results.items()
        if counts["failed"]
    ]
    return "\n".join(
        [
            "# The last soak",
            "",
            f"`make soak` of {datetime.now(UTC):%Y-%m-%d} at commit {tested}: every test, also what CI leaves out.",
            "",
            "| folder | tests | failed | skipped | seconds |",
            "|---|---|---|---|---|",
            *rows,
            f"| all | {' | '.join(total)} |",
            *(["", *failed] if failed else []),
            "",
        ]
    )


def soak(names: Sequence[str], results: dict[str, Counts], state: Path, faults: Path, *, lanes: int) -> None:
    """Run these files, so many at a time; what each has come to is kept in `state` at once."""
    with ThreadPoolExecutor(lanes) as pool:
        running = {pool.submit(run, ROOT / name, faults): name for name in names}
        for done in as_completed(running):
            results[running[done]] = done.result()
            state.write_text(json.dumps(results, indent=1, sort_keys=True))
            print(f"{running[done]}: {done.result()}", flush=True)


def main() -> None:
    """Run what has not passed yet; end with 1 if anything fails."""
    tested = commit()
    STATE.mkdir(exist_ok=True)
    state = STATE / f"{tested}.json"
    faults = STATE / f"{tested}-faults.jsonl"
    results: dict[str, Counts] = json.loads(state.read_text()) if state.exists() else {}
    names = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py"))
    left = [name for name in names if name not in results or results[name]["failed"]]
    soak([name for name in left if name not in PUBLISHED], results, state, faults, lanes=LANES)
    if any(name in PUBLISHED for name in left):  # all of them: of one that was interrupted, rows are there already
        faults.unlink(missing_ok=True)
        soak(PUBLISHED, results, state, faults, lanes=1)
    result = page(tested, dict(sorted(results.items())))
    (ROOT / "docs" / "soak.md").write_text(result)
    if faults.exists():
        write_page(faults, tested)
    print(result)
    sys.exit(any(counts["failed"] for counts in results.values()))


if __name__ == "__main__":
    main()
