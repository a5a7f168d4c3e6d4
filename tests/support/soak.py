"""Run all tests, including those that CI leaves out: `make soak`.

docs/soak.json has the counts of each test file, with the commit and the day on which it ran. A soak runs the files that
have not run at this commit, or failed there: those without counts first, then the others, the oldest first. It writes
the counts of each as soon as it ends, so it may be interrupted at any time. Committed, they let another machine, or a
later commit, go on. docs/soak.md is the page of all counts, and says from which commit the oldest are. Long files run
in parts. A part is known by its tests, so a new test among them is one more part, and leaves the results of the others.

Several files run in parallel, because tests mostly wait for other processes. The fault tests, whose times are
published, then run alone. Then comes the operator database, which has all cores; it goes on after the operators that an
interrupted soak with the same rules has finished, and docs/scoreboard.md gets its counts.

`make soak SOAK=tests/jobs` runs only the files whose paths contain the text.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from support import fault_page, scoreboard_page

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".soak"
PARALLEL = 3
FILE_SECONDS = 6 * 3600.0
LONG = (
    "tests/ownership/test_divided_models.py",
    "tests/ownership/test_states_on_grids.py",
    "tests/verify/test_real_scripts.py",
    "tests/verify/test_right_scripts.py",
    "tests/extensions/horovod/test_conformance.py",
    "tests/compiler/test_operators_on_two_axes.py",
    "tests/compiler/test_random_programs.py",
    "tests/collectives/backends/test_failed_work.py",
    "tests/jobs/test_accumulated_losses.py",
    "tests/jobs/test_lost_workers_of_meshes.py",
    "tests/jobs/test_mesh_matrix.py",
    "tests/jobs/test_pipeline_matrix.py",
    "tests/jobs/test_replaced_workers.py",
    "tests/jobs/test_sparse_runs.py",
    "tests/jobs/test_table_runs.py",
    "tests/logical/test_plain_scripts.py",
    "tests/logical/test_sharded_optimizers.py",
    "tests/logical/test_verified_scripts.py",
)
"""Files with hundreds of tests, models or meshes. They run in parts."""
PART_TESTS = 16
"""The most tests of a part."""
DIGEST_BYTES = 4
ALL_TESTS = ("-m", "exhaustive or not exhaustive")
PUBLISHED = ("tests/launch/test_faults.py", "tests/launch/test_faults_at_start.py")
DATABASE = "tests/compiler/test_operator_database.py"
DATABASE_SECONDS = 12 * 3600.0
DATABASE_OPTIONS = ("--numprocesses", "2", "-k", "not a_few_cases")
"""The few cases that CI runs are among all cases."""
ALONE = (*PUBLISHED, DATABASE)
"""Files that run without others beside them."""
COUNTS = "docs/soak.json"
PAGES = (
    COUNTS,
    "docs/torch-versions.json",
    *(f"docs/{name}.md" for name in ("soak", "faults", "scoreboard", "torch-versions")),
)
"""The pages that a soak writes."""
Counts = dict[str, float]
Result = dict[str, Any]
"""Counts, the commit and day for which they hold, and for a part of a file the digests of its tests."""


@dataclass(frozen=True)
class Part:
    """A test file, or some of its tests.

    Attributes:
        file: The file.
        tests: What pytest is to run.
    """

    file: str
    tests: tuple[str, ...]

    @property
    def digests(self) -> str:
        """The digests of its tests, one after the other; "" for a whole file."""
        return "".join(digest_name(test) for test in self.tests if "::" in test)

    @property
    def name(self) -> str:
        """What the results call it."""
        return f"{self.file} part {digest_name(self.digests)}" if self.digests else self.file


def digest_name(name: str) -> str:
    """Return the digest of the name of a test."""
    return hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES).hexdigest()


def list_parts(file: str, results: Mapping[str, Result]) -> list[Part]:
    """Return the parts of a test file: those that have results, then those of tests that no result covers."""
    if file not in LONG:
        return [Part(file, (str(ROOT / file),))]
    # Without the options of pyproject.toml, among which is a second -q: then pytest prints numbers instead of names.
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *ALL_TESTS, file]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    tests = {digest_name(line): line for line in found if "::" in line}
    assert tests, f"{file} has no tests"
    groups: list[list[str]] = []
    for name, result in sorted(results.items(), key=lambda each: each[1]["day"], reverse=True):
        digests = result.get("digests", "")
        group = [digests[start : start + 2 * DIGEST_BYTES] for start in range(0, len(digests), 2 * DIGEST_BYTES)]
        if name.startswith(f"{file} part ") and tests.keys() >= set(group):
            groups.append([tests.pop(digest) for digest in group])
    rest = list(tests.values())
    groups += [rest[start : start + PART_TESTS] for start in range(0, len(rest), PART_TESTS)]
    return [Part(file, tuple(group)) for group in groups]


def commit() -> str:
    """Return the commit under test. Exit if there are uncommitted changes, because nobody could repeat the result."""
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    if any(line[3:] not in PAGES for line in changed.stdout.splitlines()):
        sys.exit(
            "expected: everything committed, so that the result says what it covers\nfound:    changes; commit them"
        )
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return head.stdout.strip()


def run(
    part: Part,
    published: Mapping[str, Path],
    *,
    python: str = sys.executable,
    selection: Sequence[str] = ALL_TESTS,
) -> Counts:
    """Run a part of a test file and return its counts: all its tests, or a selection of pytest's options.

    Tests append rows to the files in `published`, by the environment variables that name them. A part that exceeds the
    time limit is killed and counts as failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder) / "report.xml", Path(folder) / "output.txt"
        command = [python, "-m", "pytest", "-q", *selection]
        command += ["--show-capture=stderr", "--disable-warnings", "--timeout=0", f"--junitxml={report}"]
        is_database = part.file == DATABASE
        if is_database:
            command += DATABASE_OPTIONS
        start = time.monotonic()
        environment = {**os.environ, **{name: str(path) for name, path in published.items()}}
        with output.open("w") as text, suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [*command, *part.tests],
                cwd=ROOT,
                env=environment,
                stdout=text,
                stderr=subprocess.STDOUT,
                timeout=DATABASE_SECONDS if is_database else FILE_SECONDS,
            )
        seconds = round(time.monotonic() - start, 1)
        counts = counted(report) if report.exists() else {"tests": 1, "failed": 1, "skipped": 0}
        if counts["failed"]:
            print(output.read_text(errors="replace")[-4000:], flush=True)
    return counts | {"seconds": seconds}


def counted(report: Path) -> Counts:
    """Read the numbers of tests, failures and skips from pytest's report."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    return {"tests": total["tests"], "failed": total["failures"] + total["errors"], "skipped": total["skipped"]}


def read_results() -> dict[str, Result]:
    """Return the committed results of all parts by name, and those of soaks that nobody has committed yet."""
    file = ROOT / COUNTS
    return json.loads(file.read_text()) if file.exists() else {}


def write_results(results: Mapping[str, Result]) -> None:
    """Write the results, a line each."""
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(result)}" for name, result in sorted(results.items()))
    (ROOT / COUNTS).write_text(f"{{\n{lines}\n}}\n")


def order_parts(parts: Iterable[Part], results: Mapping[str, Result], tested: str) -> list[Part]:
    """Return the parts that have not passed at a commit: those without a result first, then the oldest ones."""
    days: dict[str, str] = {}
    for part in parts:
        result = results.get(part.name)
        if result is None or result["failed"]:
            days[part.name] = ""
        elif result["commit"] != tested:
            days[part.name] = result["day"]
    return sorted((part for part in parts if part.name in days), key=lambda part: days[part.name])


def soak(
    parts: Sequence[Part], results: dict[str, Result], tested: str, published: Mapping[str, Path], *, parallel: int
) -> None:
    """Run parts of files, `parallel` at a time, and write each result at once."""
    with ThreadPoolExecutor(parallel) as pool:
        running = {pool.submit(run, part, published): part for part in parts}
        for done in as_completed(running):
            part = running[done]
            result = {**done.result(), "commit": tested, "day": f"{datetime.now(UTC):%Y-%m-%d}"}
            results[part.name] = result | ({"digests": part.digests} if part.digests else {})
            write_results(results)
            print(f"{part.name}: {done.result()}", flush=True)


def page(results: Mapping[str, Result], *, missing: Sequence[str] = ()) -> str:
    """Render the results as a page. `missing` are the files without one."""
    folders: dict[str, list[Result]] = {}
    for name, result in sorted(results.items()):
        folders.setdefault(str(Path(name).parent), []).append(result)
    rows = [format_row(name, members) for name, members in folders.items()]
    failed = [
        f"- {name}: {result['failed']:g} of {result['tests']:g} failed"
        for name, result in sorted(results.items())
        if result["failed"]
    ]
    commits = Counter((result["day"], result["commit"]) for result in results.values())
    return "\n".join(
        [
            "# Soaks",
            "",
            "`make soak` runs all tests, those outside CI too. Test files run at different commits, which "
            "[soak.json](soak.json) names for each:",
            "",
            *(
                f"- {count} files or parts of files at commit {commit}, on {day}"
                for (day, commit), count in sorted(commits.items())
            ),
            "",
            "| folder | tests | failed | skipped | seconds | run |",
            "|---|---|---|---|---|---|",
            *rows,
            format_row("all", list(results.values())),
            *(["", *failed] if failed else []),
            *(["", f"Not run yet: {', '.join(missing)}."] if missing else []),
            "",
        ]
    )


def format_row(name: str, results: Sequence[Result]) -> str:
    """Return the row of a folder: the sums of its counts, and the days of the oldest and the newest."""
    sums = [f"{sum(result[key] for result in results):g}" for key in ("tests", "failed", "skipped", "seconds")]
    days = sorted({result["day"] for result in results})
    return f"| {name} | {' | '.join(sums)} | {' to '.join(dict.fromkeys((days[0], days[-1])))} |"


def main() -> None:
    """Run the parts that have not passed at this commit. Exit with 1 if a test has failed."""
    tested, wanted = commit(), "".join(sys.argv[1:])
    STATE.mkdir(exist_ok=True)
    published = {
        "FAULTS_JSON": STATE / f"{tested}-faults.jsonl",
        "SCOREBOARD_JSONL": STATE / f"{scoreboard_page.digest_rules()}-scoreboard.jsonl",
    }
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py"))
    results = read_results()
    parts = [part for file in files for part in list_parts(file, results)]
    known = {part.name for part in parts}
    results = {name: result for name, result in results.items() if name in known}
    left = [part for part in order_parts(parts, results, tested) if wanted in part.file]
    try:
        soak([part for part in left if part.file not in ALONE], results, tested, published, parallel=PARALLEL)
        if any(part.file in PUBLISHED for part in left):  # repeat all: an interrupted file has left some of its rows
            published["FAULTS_JSON"].unlink(missing_ok=True)
            soak([part for part in parts if part.file in PUBLISHED], results, tested, published, parallel=1)
        soak([part for part in left if part.file == DATABASE], results, tested, published, parallel=1)
    finally:
        write_pages(tested, [part.file for part in parts if part.name not in results], results, published)
    sys.exit(any(result["failed"] for result in results.values()))


def write_pages(
    tested: str, missing: Iterable[str], results: Mapping[str, Result], published: Mapping[str, Path]
) -> None:
    """Write the page of the results and those of the published rows that there are."""
    text = page(results, missing=list(dict.fromkeys(missing)))
    (ROOT / "docs" / "soak.md").write_text(text)
    for name, write in (("FAULTS_JSON", fault_page.write_page), ("SCOREBOARD_JSONL", scoreboard_page.write_page)):
        if published[name].exists():
            write(published[name], tested)
    print(text, flush=True)


if __name__ == "__main__":
    main()
