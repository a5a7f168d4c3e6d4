"""Realistic scripts train exactly like their plain versions, on one device and on several."""

import difflib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.warm_runs import rankless

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "training"
SHORT = {
    "image_classifier": "--limit 150 --epochs 2 --batch-size 37",
    "language_model": "--limit 60 --max-steps 4 --accumulate 1 --d-model 32 --epochs 2",
    "gan": "--limit 103 --n_epochs 1 --batch_size 34",
    "two_tower": "--limit 150 --epochs 5 --patience 0 --batch-size 50",
    "fine_tuning": "--limit 100 --pretrain-epochs 1 --epochs 3 --unfreeze-at 1",
}
"""Arguments for a few steps: with short last batches, early stopping, unfreezing."""
ODD = {
    "image_classifier": "--limit 131 --epochs 1 --batch-size 26",
    "language_model": "--limit 55 --max-steps 8 --accumulate 1 --d-model 32 --epochs 2 --batch-size 7",
    "gan": "--limit 69 --n_epochs 2 --batch_size 34",
    "two_tower": "--limit 152 --epochs 2 --patience 0 --batch-size 60",
    "fine_tuning": "--limit 130 --pretrain-epochs 1 --epochs 3 --unfreeze-at 1 --batch-size 24",
}
"""Arguments that leave one or two rows for the last batch."""
ADDED_LINES = {"image_classifier": 22, "language_model": 15, "gan": 8, "two_tower": 9, "fine_tuning": 11}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one script: digests of its parameters after each step, and its output."""

    digests: list[str]
    printed: str
    failure: str


def copy_script(name: str, folder: Path, *, split: bool = False) -> Path:
    """Copy the script to a folder. With `split`, each rank reads and augments only its own samples."""
    lines = (SCRIPTS / f"{name}.py").read_text().splitlines(keepends=True)
    (folder / f"{name}.py").write_text("".join(line for line in lines if not split or "reading=" not in line))
    return folder / f"{name}.py"


def command(script: Path, arguments: str) -> list[str]:
    return [str(script), *arguments.split()]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Run every script and its plain version once on one device."""
    folder = tmp_path_factory.mktemp("scripts")
    names = [version for name in SHORT for version in (f"plain_{name}", name)]
    words: list[str] = []
    for name in names:
        words += [*(["--"] if words else []), *command(copy_script(name, folder), SHORT[name.removeprefix("plain_")])]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("stepwise.py"), "ran.json", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((folder / "ran.json").read_text())
    return {name: Outcome(**result) for name, result in zip(names, results, strict=True)}


@pytest.mark.parametrize("name", SHORT)
def test_a_script_adds_few_lines_to_its_plain_version(name: str) -> None:
    plain, ours = (SCRIPTS / f"plain_{name}.py").read_text(), (SCRIPTS / f"{name}.py").read_text()
    assert "rankless" not in plain
    difference = list(difflib.ndiff(plain.splitlines(), ours.splitlines()))
    assert sum(line.startswith("+ ") for line in difference) <= ADDED_LINES[name]
    assert "rank()" not in ours


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHORT)
def test_on_one_device_every_step_equals_the_plain_versions_bit_for_bit(name: str, ran: dict[str, Outcome]) -> None:
    plain, ours = ran[f"plain_{name}"], ran[name]
    assert plain.failure == "" == ours.failure
    assert len(plain.digests) >= 4
    assert ours.digests == plain.digests
    assert without_times(ours.printed) == without_times(plain.printed)


def without_times(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line and "steps/s" not in line]


def verify(
    name: str, folder: Path, *options: str, workers: int, arguments: str = "", split: bool = False
) -> dict[str, Any]:
    """Return the report of `rankless verify`, and print the output of a failed one."""
    words = command(copy_script(name, folder, split=split), arguments or SHORT[name])
    if name == "fine_tuning":
        # It saves the pretrained model to a file, and a later run would continue from there.
        first = rankless("run", "-n", "1", *words, folder=folder)
        assert first.returncode == 0, first.stderr
    options = ("-n", str(workers), "--seed", "3", "--devices", "cpu", "--json", "report.json", *options)
    done = rankless("verify", *options, *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same training: " in done.stdout
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def require_same(report: dict[str, Any]) -> None:
    assert report["same"]
    assert report["largest_loss_difference"] < 1e-11


# In float32 rounding may flip a ReLU, and verify would run everything again in float64: most tests start there.
@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "workers"), [("language_model", 2), ("gan", 3)])
def test_verify_finds_the_same_training(name: str, workers: int, tmp_path: Path, ran: dict[str, Outcome]) -> None:
    report = verify(name, tmp_path, "--dtype", "float64", workers=workers)
    require_same(report)
    assert report["steps"] == len(ran[name].digests)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", SHORT)
def test_verify_with_default_arguments_finds_the_same_training(name: str, workers: int, tmp_path: Path) -> None:
    assert verify(name, tmp_path, workers=workers)["same"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ODD)
def test_last_batches_of_fewer_rows_than_workers_are_the_same_training(name: str, tmp_path: Path) -> None:
    require_same(verify(name, tmp_path, "--dtype", "float64", arguments=ODD[name], workers=3))


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_accumulated_steps_equal_those_of_the_plain_version(workers: int, tmp_path: Path) -> None:
    arguments = "--limit 55 --accumulate 3 --d-model 32 --epochs 2 --batch-size 7 --max-length 80"
    plain = subprocess.run(
        [sys.executable, *command(copy_script("plain_language_model", tmp_path), arguments)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    words = command(copy_script("language_model", tmp_path), arguments)
    ours = rankless("run", "-n", str(workers), "--devices", "cpu", *words, folder=tmp_path)
    assert plain.returncode == 0 == ours.returncode, plain.stderr + ours.stderr
    expected, found = (re.findall(r"(?:loss|perplexity) ([\d.]+)", done.stdout) for done in (plain, ours))
    assert len(expected) >= 3
    assert list(map(float, found)) == pytest.approx(list(map(float, expected)), rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 3])
def test_augmentation_with_split_reading_is_the_same_for_any_worker_count(workers: int, tmp_path: Path) -> None:
    report = verify("image_classifier", tmp_path, "--dtype", "float64", split=True, workers=workers)
    require_same(report)
