"""A checkpoint that was written with divided states continues with any other division, and on one device."""

from pathlib import Path

import pytest
from support.warm_runs import rankless

SCRIPT = Path(__file__).parent / "scripts" / "resume.py"


def run(folder: Path, workers: int, action: str, zero: str) -> list[float]:
    done = rankless("run", "-n", str(workers), "--seed", "3", "-q", str(SCRIPT), action, zero, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(word) for word in done.stdout.split()]


@pytest.mark.slow
def test_a_checkpoint_continues_with_other_divisions_and_numbers_of_workers(tmp_path: Path) -> None:
    wanted = run(tmp_path, 2, "save", "parameters")
    for workers, zero in ((1, "none"), (3, "gradients"), (2, "optimizer"), (2, "parameters")):
        assert run(tmp_path, workers, "continue", zero) == pytest.approx(wanted, rel=1e-11)
