"""Processes and standard input of a plain script in the logical view."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import DEADLINE_SECONDS, RANKLESS, job_environment

SCRIPT = Path(__file__).with_name("process_cases.py")
TYPED = "first\nsecond\nthird\nand the rest"


def run(folder: Path, *command: str) -> tuple[list[str], dict[str, str]]:
    """Return what a command prints, without progress bars, and the files that it leaves."""
    folder.mkdir()
    done = subprocess.run(
        [*command, str(SCRIPT)],
        cwd=folder,
        env=job_environment({"OMP_NUM_THREADS": "1"}),
        input=TYPED,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    bars = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("bar:")]
    assert sum("0/3" in line for line in bars) == 1, "one rank shows its bar"
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    return [line for line in done.stdout.splitlines() if line and not line.startswith("bar:")], files


@pytest.mark.slow
def test_processes_run_once_and_all_ranks_read_rank_0s_input(tmp_path):
    plain = run(tmp_path / "plain", sys.executable)
    logs = str(tmp_path / "log")
    logical = run(tmp_path / "logical", *RANKLESS, "run", "--logical", "-n", "2", "--quiet", "--log-dir", logs)
    assert logical == plain
    outputs = [file.read_text().splitlines() for file in Path(logs).glob("2*/rank*.log")]
    first, second = ([line for line in lines if line and "bar:" not in line] for lines in outputs)
    assert first == second
