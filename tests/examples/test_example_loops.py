"""Each example differs from its plain script by a few lines, and prints the same numbers on one device."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = {"lenet": ("--epochs", "2"), "gpt": ("--steps", "20", "--layers", "1")}


def run_example(script: str, folder: Path) -> list[str]:
    name = script.removeprefix("plain_")
    command = [sys.executable, EXAMPLES / f"{script}.py", *SHORT[name]]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if re.match(r"(epoch|step|validation)\b.*:", line)]


@pytest.mark.parametrize("name", SHORT)
def test_an_example_adds_at_most_five_lines_to_its_plain_script(name: str):
    plain = (EXAMPLES / f"plain_{name}.py").read_text()
    ours = (EXAMPLES / f"{name}.py").read_text()
    assert "rankless." not in plain
    added = [
        line
        for line in difflib.unified_diff(plain.splitlines(), ours.splitlines(), n=0, lineterm="")
        if line.startswith("+") and not line.startswith("+++")
    ]
    assert 1 <= len(added) <= 5, added


@pytest.mark.exhaustive
@pytest.mark.slow
# `make demo`, which CI runs, trains and verifies LeNet.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name == "lenet")) for name in SHORT]
)
def test_an_example_prints_what_its_plain_script_prints(name: str, tmp_path: Path):
    plain = run_example(f"plain_{name}", tmp_path)
    assert plain
    assert run_example(name, tmp_path) == plain
