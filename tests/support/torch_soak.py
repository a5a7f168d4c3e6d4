"""Run tests on the other supported versions of PyTorch: `make soak-torch`.

These are CI's tests of compiler, jobs, the logical view and plain scripts, collectives and verify.

Each version gets an environment of its own, with all packages of requirements/locked.txt beside torch. The environments
lie in `.soak/torch`, or where TORCH_ENVIRONMENTS says; each takes up to 6 GB, because newer and older versions come as
CUDA builds. A version whose environment exists is not installed again.

docs/torch-versions.json has the counts of each test file on each version, with the commit and the day. A soak runs the
files without counts first, then the oldest, 25 at a time, and writes their counts: it may be interrupted at any time.
docs/torch-versions.md shows the sums.

`make soak-torch VERSIONS="2.12 2.14" SOAK=tests/jobs` runs some versions, and the files whose paths contain the text.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from support import soak
from support.soak import ROOT, Counts, Part, Result

from rankless.torch_versions import PINNED, SUPPORTED

FOLDERS = tuple(f"tests/{name}" for name in ("collectives", "jobs", "compiler", "logical", "plain_script", "verify"))
COUNTS, PAGE = ROOT / "docs/torch-versions.json", ROOT / "docs/torch-versions.md"
CI_TESTS = ("-m", "not exhaustive")
TOGETHER = 25
"""How many files one process runs."""
TEST_SECONDS = 600
INTRODUCTION = f"""# PyTorch versions

Rankless supports PyTorch {SUPPORTED[0]} to {SUPPORTED[-1]}. CI runs all tests on {PINNED}. On the other versions
`make soak-torch` runs CI's tests of compiler, jobs, the logical view and plain scripts, collectives and verify.
[torch-versions.json](torch-versions.json) has the counts of each file. With PyTorch 2.11 and 2.12 there are no process
groups in shared memory; their tests are skipped.

| PyTorch | files run | tests | failed | skipped | run |
|---|---|---|---|---|---|
"""


def environment_folder(version: str) -> Path:
    """Return the folder of a version's environment."""
    return Path(os.environ.get("TORCH_ENVIRONMENTS") or soak.STATE / "torch") / version


def make_environment(version: str) -> Path:
    """Return the Python of a version's environment, and install it first unless that was done before."""
    folder = environment_folder(version)
    python, ready = folder / "bin/python", folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
        subprocess.run([*pip, f"torch=={version}.*"], check=True)
        subprocess.run([*pip, "--no-deps", "--requirement", ROOT / "requirements/locked.txt"], check=True)
        ready.touch()
    # Every time: another checkout may have used the environment.
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ROOT], check=True
    )
    return python


def read_counts() -> dict[str, dict[str, Result]]:
    """Return the committed counts of all versions: by version, then by file."""
    return json.loads(COUNTS.read_text()) if COUNTS.exists() else {}


def write_counts(counts: Mapping[str, Mapping[str, Result]]) -> None:
    """Write the counts, a line for each file of each version, and their page."""
    versions = []
    for version, results in sorted(counts.items()):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(result)}" for name, result in sorted(results.items()))
        versions.append(f" {json.dumps(version)}: {{\n{lines}\n }}")
    COUNTS.write_text("{\n" + ",\n".join(versions) + "\n}\n")
    PAGE.write_text(page(counts))


def page(counts: Mapping[str, Mapping[str, Result]]) -> str:
    """Render the sums of each version, and the files with failures."""
    rows, failed = [], []
    for version, results in sorted(counts.items()):
        sums = [f"{sum(result[key] for result in results.values()):g}" for key in ("tests", "failed", "skipped")]
        days = sorted({result["day"] for result in results.values()})
        rows.append(
            f"| {version} | {len(results)} | {' | '.join(sums)} | {' to '.join(dict.fromkeys((days[0], days[-1])))} |"
        )
        failed += [
            f"- {version}, {name}: {result['failed']:g} of {result['tests']:g} failed"
            for name, result in sorted(results.items())
            if result["failed"]
        ]
    return "\n".join([INTRODUCTION + "\n".join(rows), *(["", *failed] if failed else []), ""])


def soak_version(version: str, wanted: str, tested: str) -> None:
    """Run the files of a version that have not passed at this commit, the oldest results first.

    One process runs many files, because each start imports torch. If it breaks, its files run alone.
    """
    python = make_environment(version)
    found = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("test_*.py"))
    names = [str(file.relative_to(ROOT)) for file in found]
    parts = [Part(name, (str(ROOT / name),)) for name in names if wanted in name]
    due = soak.order_parts(parts, read_counts().get(version, {}), tested)
    for start in range(0, len(due), TOGETHER):
        group = due[start : start + TOGETHER]
        results = run_together(python, group) or {
            part.name: soak.run(part, {}, python=python, selection=CI_TESTS) for part in group
        }
        about = {"commit": tested, "day": f"{datetime.now(UTC):%Y-%m-%d}"}
        known = read_counts()
        rows = {name: {**counts, **about} for name, counts in results.items()}
        write_counts({**known, version: {**known.get(version, {}), **rows}})
        for name, counts in results.items():
            print(f"PyTorch {version}, {name}: {counts}", flush=True)


def run_together(python: str, parts: Sequence[Part]) -> dict[str, Counts] | None:
    """Run several files in one process and return the counts of each; None if the process broke."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", *CI_TESTS, "--disable-warnings", f"--timeout={TEST_SECONDS}"]
        files = [test for part in parts for test in part.tests]
        done = subprocess.run(
            [*command, f"--junitxml={report}", *files], cwd=ROOT, capture_output=True, text=True, errors="replace"
        )
        if done.returncode not in (0, 1, 5) or not report.exists():
            return None
        if done.returncode == 1:
            print(done.stdout[-8000:], flush=True)
        return count_by_file(report, [part.name for part in parts])


def count_by_file(report: Path, names: Sequence[str]) -> dict[str, Counts]:
    """Read the counts of each file from pytest's report. A file of which no test was selected has none."""
    counts: dict[str, Counts] = {name: {"tests": 0, "failed": 0, "skipped": 0, "seconds": 0.0} for name in names}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = str(case.get("classname") or case.get("name")).replace(".", "/") + ".py"
        name = next(name for name in names if f"/{name}".endswith(f"/{module}"))
        row = counts[name]
        row["tests"] += 1
        row["failed"] += case.find("failure") is not None or case.find("error") is not None
        row["skipped"] += case.find("skipped") is not None
        row["seconds"] = round(row["seconds"] + float(case.get("time") or 0), 1)
    return counts


def main(versions: Sequence[str], wanted: str) -> None:
    """Run the versions one after the other. Exit with 1 if a test has failed."""
    tested = soak.commit()
    soak.STATE.mkdir(exist_ok=True)
    for version in versions:
        soak_version(version, wanted, tested)
    sys.exit(any(result["failed"] for results in read_counts().values() for result in results.values()))


if __name__ == "__main__":
    given = os.environ.get("VERSIONS", "").split()
    main(given or [version for version in SUPPORTED if not PINNED.startswith(version)], "".join(sys.argv[1:]))
