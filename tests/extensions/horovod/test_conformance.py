"""Horovod's documented behaviour, sentence by sentence, under both launchers.

`conformance/program.py` makes all checks in one job; each check is one test here. `make soak` runs it ten times over.
"""

import ast
import json
import sys
from pathlib import Path

import pytest
from support.jobs import rankless

HERE = Path(__file__).parent / "conformance"
NAMES = [
    f"{file.stem}.{node.name.removeprefix('check_')}"
    for file in sorted(HERE.glob("*.py"))
    for node in ast.parse(file.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]
LAUNCHERS = {
    "run": lambda size: ("run", "-n", str(size)),
    "horovodrun": lambda size: ("horovodrun", "-np", str(size), sys.executable),
}
SAMPLE = (("horovodrun", 3),)
JOBS = [
    pytest.param(launcher, size, marks=[] if (launcher, size) in SAMPLE else [pytest.mark.exhaustive])
    for launcher in LAUNCHERS
    for size in (2, 3, 4)
]


def results(launcher: str, size: int, folder: Path) -> tuple[dict[str, list[str]], str]:
    """The error of each rank, by check; and what the job has printed."""
    program = str(HERE / "program.py")
    done = rankless(*LAUNCHERS[launcher](size), program, str(folder), folder=folder, OMP_NUM_THREADS="1")
    found: dict[str, list[str]] = {}
    for rank in range(size):
        for line in (folder / f"{rank}.jsonl").read_text().splitlines():
            row = json.loads(line)
            found.setdefault(row["name"], []).append(row["error"])
    return found, done.stdout + done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def made() -> dict[tuple[str, int], tuple[dict[str, list[str]], str]]:
    return {}


@pytest.mark.ci_sample(15)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("launcher", "size"), JOBS)
def test_every_documented_behaviour_holds(
    launcher: str,
    size: int,
    name: str,
    made: dict[tuple[str, int], tuple[dict[str, list[str]], str]],
    tmp_path_factory: pytest.TempPathFactory,
):
    if (launcher, size) not in made:
        made[launcher, size] = results(launcher, size, tmp_path_factory.mktemp(launcher))
    found, failure = made[launcher, size]
    assert name in found, f"was not reached: {failure[-3000:]}"
    assert found[name] == [""] * size


@pytest.mark.exhaustive
@pytest.mark.parametrize("time", range(10))
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ten_times_without_a_hang_or_an_abort(launcher: str, size: int, time: int, tmp_path: Path):
    found, failure = results(launcher, size, tmp_path)
    assert not failure
    assert len(found) == len(NAMES), time
    assert all(errors == [""] * size for errors in found.values())


def test_no_file_of_checks_is_left_out():
    listed = next(
        ast.literal_eval(node.value)
        for node in ast.parse((HERE / "program.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODULES"
    )
    assert {name.partition(".")[0] for name in NAMES} == set(listed)
