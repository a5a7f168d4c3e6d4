"""`rankless verify` calls each plain script, as its user typed it, the same training on several workers."""

from pathlib import Path

import pytest
from logical.test_plain_scripts import FOLDER, SCRIPTS
from support.warm_runs import rankless

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_verify_calls_a_plain_script_the_same_training(name: str, workers: int, tmp_path: Path) -> None:
    found = rankless("verify", "-n", str(workers), "--devices", "cpu", str(FOLDER / f"{name}.py"), folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"on 1 and on {workers} workers in the logical view" in found.stdout
