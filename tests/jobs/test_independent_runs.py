"""Runs in which workers train on batches of their own, with servers that hold all parameters."""

import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_runs import rankless

SCRIPT = Path(__file__).parent / "scripts/train_independently.py"


def read_result(output: str):
    return json.loads(next(line for line in output.splitlines() if line.startswith("RESULT")).removeprefix("RESULT"))


def run(folder, script, *arguments, servers=2, workers=3, mode="async", **options):
    given = ("--servers", servers, "--workers", workers, "--server-mode", mode, "--seed", "1", "--no-progress")
    return rankless("run", *map(str, given), str(script), *map(str, arguments), folder=folder, **options)


def train(folder, script, *arguments, **options):
    done = run(folder, script, *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_result(done.stdout)


@functools.cache
def plain_trainings():
    done = subprocess.run([sys.executable, str(SCRIPT), "plain"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return read_result(done.stdout)


def difference(found, wanted) -> float:
    """The largest difference of numbers in two nested results of the same form."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        return max((difference(found[key], wanted[key]) for key in wanted), default=0.0)
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        return max((difference(*pair) for pair in zip(found, wanted, strict=True)), default=0.0)
    return 0.0 if found == wanted else abs(found - wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "servers", "mode"),
    [
        (3, 2, "async"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in [(1, 1, "async"), (2, 3, "bounded")]),
    ],
)
def test_workers_that_take_turns_train_as_one_device(tmp_path, workers, servers, mode):
    found = train(tmp_path, SCRIPT, "rankless", workers=workers, servers=servers, mode=mode)
    wanted = plain_trainings()
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert all(map(math.isfinite, wanted[name]["losses"]))
        assert difference(found[name], wanted[name]) < 1e-12, name
