"""Run all tests, including those that CI leaves out: `make soak`.

A soak can be resumed: it does not repeat test files that passed at the same commit. Nor does it repeat those that
passed at an earlier commit if only other tests have changed since; the page then says so. It writes the commit
and the raw counts to docs/soak.md. Several files run in parallel, because tests mostly wait for other processes. The
longest ones run in parts, so that an interrupted soak loses little. The fault tests, whose times are published, then
run alone. Then comes the operator database, which has all cores; it goes on after the operators that an interrupted
soak has finished, and docs/scoreboard.md gets its counts. The matrices of models and meshes come last. docs/soak.md is
written before and after each of these, and says what is missing.

docs/soak.json has the counts of each file as soon as it ends. Committed, it lets another machine go on with the soak.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from support import fault_page, scoreboard_page

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".soak"
PARALLEL = 3
FILE_SECONDS = 6 * 3600.0
LONGEST = (
    "tests/ownership/test_divided_models.py",
    "tests/verify/test_real_scripts.py",
    "tests/compat/test_conformance.py",
    "tests/compiler/test_random_programs.py",
    "tests/verify/test_right_scripts.py",
)
"""Files that start first, so that none of them runs alone at the end. They run in parts."""
MATRICES = (
    "tests/ownership/test_states_on_grids.py",
    "tests/jobs/test_mesh_matrix.py",
    "tests/jobs/test_pipeline_matrix.py",
)
"""Files with hundreds of models and meshes, which come last. They run in parts."""
PART_TESTS = 16
"""The tests of a part."""
ALL_TESTS = ("-m", "exhaustive or not exhaustive")
PUBLISHED_ROWS = {"FAULTS_JSON": "faults.jsonl", "SCOREBOARD_JSONL": "scoreboard.jsonl"}
"""The environment variables with the files for rows of tests, and how these files end."""
PUBLISHED = ("tests/launch/test_faults.py", "tests/launch/test_faults_at_start.py")
DATABASE = "tests/compiler/test_operator_database.py"
DATABASE_SECONDS = 12 * 3600.0
DATABASE_OPTIONS = ("--numprocesses", "2", "-k", "not a_few_cases")
"""The few cases that CI runs are among all cases."""
COUNTS = "docs/soak.json"
PAGES = (COUNTS, *(f"docs/{name}.md" for name in ("soak", "faults", "scoreboard")))
"""The pages that a soak writes."""
INDEPENDENT = re.compile(rf"tests/(.*/)?test_\w+\.py|tests/support/soak\.py|{'|'.join(map(re.escape, PAGES))}")
"""Files on which no test file but themselves depends."""
HELPER = re.compile(r"tests/(?!support/)\w+/(.*/)?\w+\.py")
"""Other modules of a folder of tests, on which its test files may depend, and those elsewhere that name it."""
Counts = dict[str, float]


@dataclass(frozen=True)
class Part:
    """A test file, or some of its tests.

    Attributes:
        file: The file.
        number: The number of the part, from 1.
        count: The number of parts of the file.
        tests: What pytest is to run.
    """

    file: str
    number: int
    count: int
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the results call it; see `find_file`."""
        return self.file if self.count == 1 else f"{self.file} part {self.number} of {self.count}"


def find_file(name: str) -> str:
    """Return the file of a part from its name."""
    return name.partition(" part ")[0]


def list_parts(file: str) -> list[Part]:
    """Return the parts of a test file."""
    if file not in (*LONGEST, *MATRICES):
        return [Part(file, 1, 1, (str(ROOT / file),))]
    # Without the options of pyproject.toml, among which is a second -q: then pytest prints numbers instead of names.
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *ALL_TESTS, file]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    tests = [line for line in found if "::" in line]
    assert tests, f"{file} has no tests"
    groups = [tests[start : start + PART_TESTS] for start in range(0, len(tests), PART_TESTS)]
    return [Part(file, number, len(groups), tuple(group)) for number, group in enumerate(groups, 1)]


def commit() -> str:
    """Return the commit under test. Exit if there are uncommitted changes, because nobody could repeat the result."""
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    if any(line[3:] not in PAGES for line in changed.stdout.splitlines()):
        sys.exit(
            "expected: everything committed, so that the result says what it covers\nfound:    changes; commit them"
        )
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return head.stdout.strip()


def run(part: Part, published: Mapping[str, Path]) -> Counts:
    """Run a part of a test file with all markers and return its counts.

    Tests append rows to the files in `published`, by the environment variables that name them. A part that exceeds the
    time limit is killed and counts as failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder) / "report.xml", Path(folder) / "output.txt"
        command = [sys.executable, "-m", "pytest", "-q", *ALL_TESTS]
        command += ["--show-capture=stderr", "--disable-warnings", f"--junitxml={report}"]
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


def reuse(tested: str) -> tuple[str, dict[str, Counts]]:
    """Return the latest soaked commit from which only tests have changed, and its results that still hold.

    The commit is "" if there is none.
    """
    states = sorted(STATE.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    candidates = [(state.stem, json.loads(state.read_text())) for state in states]
    if (ROOT / COUNTS).exists():
        committed = json.loads((ROOT / COUNTS).read_text())
        candidates.append((committed["commit"], committed["files"]))
    for earlier, results in candidates:
        command = ["git", "diff", "--name-only", earlier, tested]
        changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        names = changed.stdout.split()
        if changed.returncode == 0 and all(INDEPENDENT.fullmatch(name) or HELPER.fullmatch(name) for name in names):
            return earlier, {
                test: counts
                for test, counts in results.items()
                if not any(depends(find_file(test), name) for name in names)
            }
    return "", {}


def depends(test: str, changed: str) -> bool:
    """Return whether the result of a test file may depend on a changed file of the tests."""
    if test == changed or INDEPENDENT.fullmatch(changed):
        return test == changed
    text = (ROOT / test).read_text() if (ROOT / test).exists() else ""
    return test.split("/")[1] == changed.split("/")[1] or re.search(rf"\b{Path(changed).stem}\b", text) is not None


def page(tested: str, results: dict[str, Counts], *, base: str = "", missing: Sequence[str] = ()) -> str:
    """Render the result as a page.

    `base` is an earlier commit of which some results are, "" if there is none. `missing` are the files not run yet.
    """
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
            f"`make soak` of {datetime.now(UTC):%Y-%m-%d} at commit {tested}: all tests, those outside CI too.",
            *(
                [f"Only tests differ from commit {base}. What depends on them ran again; the others ran there."]
                if base
                else []
            ),
            "",
            "| folder | tests | failed | skipped | seconds |",
            "|---|---|---|---|---|",
            *rows,
            f"| all | {' | '.join(total)} |",
            *(["", *failed] if failed else []),
            *(["", f"Not run yet: {', '.join(missing)}."] if missing else []),
            "",
        ]
    )


def soak(
    parts: Sequence[Part], results: dict[str, Counts], state: Path, published: Mapping[str, Path], *, parallel: int
) -> None:
    """Run parts of files, `parallel` at a time, and write each result to `state` and docs/soak.json at once."""
    with ThreadPoolExecutor(parallel) as pool:
        running = {pool.submit(run, part, published): part.name for part in parts}
        for done in as_completed(running):
            results[running[done]] = done.result()
            state.write_text(json.dumps(results, indent=1, sort_keys=True))
            write_counts(state.stem, results)
            print(f"{running[done]}: {done.result()}", flush=True)


def write_counts(tested: str, results: dict[str, Counts]) -> None:
    """Write the counts of each file or part, a line each, with the commit that they hold for."""
    files = ",\n".join(f" {json.dumps(name)}: {json.dumps(counts)}" for name, counts in sorted(results.items()))
    (ROOT / COUNTS).write_text(f'{{"commit": "{tested}", "files": {{\n{files}\n}}}}\n')


def main() -> None:
    """Run the files that have not passed yet. Exit with 1 if a test fails."""
    tested = commit()
    STATE.mkdir(exist_ok=True)
    state = STATE / f"{tested}.json"
    published = {name: STATE / f"{tested}-{suffix}" for name, suffix in PUBLISHED_ROWS.items()}
    note = STATE / f"{tested}-base.txt"
    results: dict[str, Counts]
    if state.exists():
        base, results = note.read_text() if note.exists() else "", json.loads(state.read_text())
    else:
        base, results = reuse(tested)
        note.write_text(base)
        for name, suffix in PUBLISHED_ROWS.items():
            if base and (earlier := STATE / f"{base}-{suffix}").exists():
                published[name].write_bytes(earlier.read_bytes())
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py"))
    parts = [part for file in files for part in list_parts(file)]
    names = [part.name for part in parts]
    left = [part for part in parts if part.name not in results or results[part.name]["failed"]]
    places = {file: place for place, file in enumerate(LONGEST)}
    ordered = sorted(left, key=lambda part: places.get(part.file, len(LONGEST)))
    alone = (DATABASE, *PUBLISHED, *MATRICES)
    soak([part for part in ordered if part.file not in alone], results, state, published, parallel=PARALLEL)
    if any(part.file in PUBLISHED for part in left):  # repeat all: an interrupted file has left some of its rows
        published["FAULTS_JSON"].unlink(missing_ok=True)
        soak([part for part in parts if part.file in PUBLISHED], results, state, published, parallel=1)
    write_pages(tested, base, names, results, published)
    database = [part for part in left if part.file == DATABASE]
    if database:
        soak(database, results, state, published, parallel=1)
        write_pages(tested, base, names, results, published)
    soak([part for part in left if part.file in MATRICES], results, state, published, parallel=PARALLEL)
    write_pages(tested, base, names, results, published)
    sys.exit(any(counts["failed"] for counts in results.values()))


def write_pages(
    tested: str, base: str, names: Sequence[str], results: dict[str, Counts], published: Mapping[str, Path]
) -> None:
    """Write the page of the soak and those of the published rows that there are."""
    missing = list(dict.fromkeys(find_file(name) for name in names if name not in results))
    result = page(tested, dict(sorted(results.items())), base=base, missing=missing)
    (ROOT / "docs" / "soak.md").write_text(result)
    for name, write in (("FAULTS_JSON", fault_page.write_page), ("SCOREBOARD_JSONL", scoreboard_page.write_page)):
        if published[name].exists():
            write(published[name], tested)
    print(result, flush=True)


if __name__ == "__main__":
    main()
