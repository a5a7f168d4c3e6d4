"""Files of a plain script in the logical view: folders and output are those of plain Python, also if a rank is slow."""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.jobs import job_environment
from support.warm_runs import rankless

HERE = Path(__file__).parent
SCRIPT = HERE / "file_cases.py"
CONCURRENT = HERE / "concurrent_cases.py"

Files = Mapping[str, bytes]


def list_cases(script: Path) -> list[str]:
    """Return the names of the cases of a script."""
    return [
        element.id
        for node in ast.parse(script.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES" and isinstance(node.value, ast.List)
        for element in node.value.elts
        if isinstance(element, ast.Name)
    ]


QUIET = {"PYTHONWARNINGS": "ignore::FutureWarning"}
"""PyTorch 2.14 warns of `torch.jit`, and a worker's output has both its streams."""


def read_files(folder: Path) -> Files:
    """Return the content of each file, and a mark for each folder and link, by relative path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        is_file = path.is_file() and not path.is_symlink()
        found[name] = path.read_bytes() if is_file else str(path.is_symlink()).encode()
    return found


def run_plain(folder: Path, script: Path) -> tuple[Files, list[str]]:
    environment = job_environment({"OMP_NUM_THREADS": "1"} | QUIET)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return read_files(folder), done.stdout.splitlines()


def run_logical(folder: Path, script: Path, *options: str, **environment: str) -> tuple[Files, list[str]]:
    logs = folder.with_name(f"{folder.name}-log")
    options = ("--logical", *options, "--quiet", "--log-dir", str(logs))
    done = rankless("run", *options, str(script), folder=folder, **environment, **QUIET)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "both write" not in done.stderr
    return read_files(folder), done.stdout.splitlines()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, list[str]]:
    return run_plain(tmp_path_factory.mktemp("plain"), SCRIPT)


@pytest.fixture(scope="module")
def logical(tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, list[str]]:
    return run_logical(tmp_path_factory.mktemp("logical"), SCRIPT, "-n", "2")


@pytest.mark.slow
@pytest.mark.parametrize("case", list_cases(SCRIPT))
def test_a_case_leaves_and_prints_what_plain_python_does(case, plain, logical):
    (files, lines), (own_files, own_lines) = plain, logical
    assert [line for line in own_lines if line.startswith(f"{case} ")] == [
        line for line in lines if line.startswith(f"{case} ")
    ]
    wanted = {name: data for name, data in files.items() if name.partition("/")[0] == case}
    assert wanted, "the case leaves at least its result"
    assert {name: data for name, data in own_files.items() if name.partition("/")[0] == case} == wanted


@pytest.mark.slow
def test_all_cases_together_leave_nothing_else(plain, logical):
    assert logical == plain


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("slow", "workers"), [(1, 2), (0, 2), (2, 3)])
def test_slow_ranks_change_nothing(slow, workers, plain, tmp_path):
    assert run_slowed(tmp_path / "run", SCRIPT, slow=slow, workers=workers) == plain


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("slow", [0, None, 1])
def test_threads_processes_and_data_sets(slow, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    assert run_slowed(tmp_path / "run", CONCURRENT, slow=slow, workers=2) == run_plain(plain, CONCURRENT)


def run_slowed(folder: Path, script: Path, *, slow: int | None, workers: int) -> tuple[Files, list[str]]:
    """Run a script in the logical view with one rank that waits before each use of a file."""
    folder.mkdir()
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    options = ("-n", str(workers), "--preload", "slow_rank")
    return run_logical(folder, script, *options, SLOW_RANK=str(slow), PYTHONPATH=path)
