"""Plain PyTorch scripts, as people write them, in the logical view: the same outputs and files as on one device.

The scripts know nothing of ranks, and run unchanged. The oracle is `python script.py`; both compute in float64.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from logical.script_outputs import compare_files, compare_texts
from support.jobs import job_environment
from support.warm_runs import rankless

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent / "scripts"
IN_FLOAT64 = Path(__file__).parent / "in_float64.py"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
RUN_WHOLE = {
    "actor_critic": "has no loader: each state comes from the environment",
    "char_gpt_batches": "has no loader: the script cuts its batches itself",
    "dqn": "has no loader: batches come from a replay buffer",
    "gcn": "has no loader: one graph is one batch",
    "neural_style": "has no loader: it trains one image",
    "word_language_lstm": "has no loader: the script cuts its batches itself",
}
"""The scripts whose work is not divided. Every rank computes all of it."""
IN_CI = ("digits_cnn",)
CASES = [
    pytest.param(name, workers, marks=() if name in IN_CI and workers == 2 else pytest.mark.exhaustive)
    for workers in (2, 3)
    for name in SCRIPTS
]


def run_plain(script: Path, folder: Path) -> str:
    """Run a script without Rankless, and return what it prints."""
    command = [sys.executable, str(IN_FLOAT64), str(script)]
    found = subprocess.run(command, cwd=folder, env=job_environment({}), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize(("name", "workers"), CASES)
def test_a_plain_script_prints_and_writes_what_it_does_on_one_device(name: str, workers: int, tmp_path: Path) -> None:
    script, one, several = FOLDER / f"{name}.py", tmp_path / "one", tmp_path / "several"
    one.mkdir(), several.mkdir()
    expected = run_plain(script, one)
    options = ("-n", str(workers), "--logical", "--devices", "cpu", "--log-dir", str(tmp_path / "log"))
    found = rankless("run", *options, str(IN_FLOAT64), str(script), folder=several)
    assert found.returncode == 0, found.stdout + found.stderr
    assert not compare_texts(expected, found.stdout)
    assert not compare_files(one, several)
    assert ("every worker computes whole batches" in found.stderr) == (name in RUN_WHOLE), found.stderr


def test_every_script_that_runs_whole_is_there() -> None:
    assert set(RUN_WHOLE) <= set(SCRIPTS)
    assert len(SCRIPTS) - len(RUN_WHOLE) >= 30


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ("loss 0.123456789", "loss 0.123456799"),
        ("loss 1.0", "loss 1.000000002"),
        ("accuracy 0.5", "accuracy 0.6"),
        ("loss 1e-5", "loss 2e-5"),
        ("3 of 4", "4 of 4"),
        ("a", "a\na"),
        ("nan 0.5", "inf 0.5"),
    ],
)
def test_the_comparison_finds_a_difference(expected: str, found: str) -> None:
    assert compare_texts(expected, found)
    assert not compare_texts(expected, expected)


def test_the_comparison_allows_rounding_and_the_last_digit() -> None:
    assert not compare_texts("loss 0.12345678 and 1e-5", "loss 0.12345679 and 1.0000000001e-5")
