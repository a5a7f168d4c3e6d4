"""Models as people write them, each beside its plain script for one device: `verify` calls each the same training.

`real_scripts/plain` has the plain scripts. `real_scripts` has the same with Rankless, at most ten lines apart.
"""

import difflib
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from support import warm_runs
from support.verify_output import read_verdict
from support.warm_runs import rankless

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent / "real_scripts"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
WORKERS = (2, 3, 4)
SAMPLE = ("ppo_normal", "tagger")
"""Values that the job reads, and a job that is not captured."""
MOST_LINES = 10
HANG_SECONDS = 600.0
UNDECIDED = ("t5",)
"""Scripts whose first step amplifies rounding so much that `verify` may not decide."""
IN_PIPELINES = (
    *("bert", "ctc_speech", "detector", "diffusion", "dqn", "gpt2_checkpoints"),
    *("llama", "mamba", "seq2seq", "tagger", "vae", "whisper"),
)
"""Scripts of which no layer and no loss needs the whole batch in the middle of the model."""


def list_new_lines(plain: list[str], script: list[str]) -> list[str]:
    return [line for line in difflib.unified_diff(plain, script, n=0, lineterm="") if line[0] == "+"][1:]


def require_same(name: str, workers: int, folder: Path, *options: str) -> str:
    """Verify a script against its plain one, and return the verdict."""
    command = ("verify", "-n", str(workers), "--devices", "cpu", *options, str(FOLDER / f"{name}.py"))
    # Ten runs of a model and more, on a machine that may be busy: the limit is for commands that hang.
    with patch.object(warm_runs, "DEADLINE_SECONDS", HANG_SECONDS):
        job = rankless(*command, folder=folder)
    assert job.returncode == 0, job.stdout + job.stderr
    verdict = read_verdict(job.stdout)
    assert verdict.startswith("same training: ")
    assert f" on 1 and on {workers} workers" in verdict
    return verdict


def run_alone(script: Path, folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def require_same_output(name: str, folder: Path) -> None:
    plain = run_alone(FOLDER / "plain" / f"{name}.py", folder)
    assert plain.strip()
    assert run_alone(FOLDER / f"{name}.py", folder) == plain


def test_every_script_has_its_plain_script() -> None:
    assert sorted(path.stem for path in (FOLDER / "plain").glob("*.py")) == SCRIPTS
    assert len(SCRIPTS) >= 22


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_differs_from_its_plain_script_by_at_most_ten_lines(name: str) -> None:
    plain, script = ((folder / f"{name}.py").read_text().splitlines() for folder in (FOLDER / "plain", FOLDER))
    assert "import rankless" in script
    assert not any("rankless" in line for line in plain)
    lines = list_new_lines(plain, script)
    assert 0 < len(lines) <= MOST_LINES, lines


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAMPLE)
def test_a_real_script_is_the_same_training_as_its_plain_script(name: str, tmp_path: Path) -> None:
    verdict = require_same(name, 2, tmp_path, "--against", str(FOLDER / "plain" / f"{name}.py"))
    assert f", as in {name}.py" in verdict
    require_same_output(name, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_real_script_prints_on_one_device_what_its_plain_script_prints(name: str, tmp_path: Path) -> None:
    require_same_output(name, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in UNDECIDED])
def test_every_real_script_is_the_same_training_on_every_number_of_workers(
    name: str, workers: int, tmp_path: Path
) -> None:
    verdict = require_same(name, workers, tmp_path, "--against", str(FOLDER / "plain" / f"{name}.py"))
    assert f", as in {name}.py" in verdict


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", UNDECIDED)
def test_a_noisy_script_is_not_called_another_training(name: str, workers: int, tmp_path: Path) -> None:
    command = ("verify", "-n", str(workers), "--devices", "cpu", str(FOLDER / f"{name}.py"))
    job = rankless(*command, folder=tmp_path)
    assert job.returncode in (0, 3), job.stdout + job.stderr
    assert read_verdict(job.stdout).startswith(("same training: ", "could not be decided: "))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", IN_PIPELINES)
def test_a_real_script_in_a_pipeline_is_the_same_training(name: str, tmp_path: Path) -> None:
    require_same(name, 2, tmp_path, "--mesh", "pipeline=2", "--dtype", "float64")
