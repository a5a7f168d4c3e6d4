"""Right scripts, as people write them: `verify` calls each the same training, with every seed.

The scripts have what made `verify` err: batch norm after a bias, dropout, adaptive optimizers, bfloat16, clipping,
averages of models, early stopping, numbers that are zero but for rounding.
"""

from pathlib import Path

import pytest
from support.verify_output import read_verdict
from support.warm_runs import rankless

pytestmark = pytest.mark.slow

SCRIPTS = sorted(path.stem for path in (Path(__file__).parent / "right_scripts").glob("*.py"))
SEEDS = range(20)
SAMPLE = ["policy_gradient"]


def require_same(name: str, seed: int, folder: Path) -> None:
    script = Path(__file__).parent / "right_scripts" / f"{name}.py"
    job = rankless("verify", "-n", "2", "--devices", "cpu", "--seed", str(seed), str(script), folder=folder)
    assert job.returncode == 0, job.stdout + job.stderr
    assert read_verdict(job.stdout).startswith("same training: ")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAMPLE)
def test_a_right_script_is_the_same_training(name: str, tmp_path: Path) -> None:
    require_same(name, 0, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_right_script_is_the_same_training_with_every_seed(name: str, seed: int, tmp_path: Path) -> None:
    require_same(name, seed, tmp_path)
