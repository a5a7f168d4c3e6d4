"""`rankless verify` calls each plain script, as its user typed it, the same training on several workers.

It runs a script several times in one folder. So it cannot decide about one that resumes from its own checkpoint. It
compares the steps of optimizers, so it refuses a script that changes its parameters by hand.
"""

from pathlib import Path

import pytest
from logical.test_plain_scripts import FOLDER, SCRIPTS
from support.warm_runs import rankless

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

RESUMES = "early_stopping_resume"
STEPS_BY_HAND = "word_language_lstm"


def test_a_script_that_resumes_from_its_own_checkpoint_is_not_decided(tmp_path: Path) -> None:
    found = rankless("verify", "-n", "2", "--devices", "cpu", str(FOLDER / f"{RESUMES}.py"), folder=tmp_path)
    assert found.returncode == 3, found.stdout + found.stderr
    assert "next: seed all random generators of the script, and read no file that an earlier run wrote" in found.stdout


def test_a_script_that_changes_its_parameters_by_hand_is_refused(tmp_path: Path) -> None:
    found = rankless("verify", "-n", "2", "--devices", "cpu", str(FOLDER / f"{STEPS_BY_HAND}.py"), folder=tmp_path)
    assert found.returncode == 2, found.stdout + found.stderr
    assert (
        "expected: a script that trains: it calls at least one job, or steps an optimizer of torch.optim"
        in found.stderr
    )


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in (RESUMES, STEPS_BY_HAND)])
def test_verify_calls_a_plain_script_the_same_training(name: str, workers: int, tmp_path: Path) -> None:
    found = rankless("verify", "-n", str(workers), "--devices", "cpu", str(FOLDER / f"{name}.py"), folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"on 1 and on {workers} workers in the logical view" in found.stdout
