"""The GPT for any mesh prints the losses of one device, and continues from a checkpoint of another mesh."""

import re
from pathlib import Path

import pytest
from support.warm_runs import rankless

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_hybrid.py"


def run(folder: Path, mesh: str, *options: str) -> list[float]:
    """Return the losses and norms that the example prints."""
    where = ("--mesh", mesh) if mesh else ()
    done = rankless("run", *where, "-q", str(EXAMPLE), "--steps", "3", "--layers", "2", *options, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(number) for number in re.findall(r"(?:loss|gradient) ([\d.]+)", done.stdout)]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_example_prints_the_same_losses_on_every_mesh(tmp_path):
    wanted = run(tmp_path, "", "--save", "saved")
    assert len(wanted) == 2
    assert run(tmp_path, "pipeline=2,tensor=2", "--schedule", "zero-bubble") == pytest.approx(wanted, rel=2e-3)
    further = run(tmp_path, "", "--load", "saved")
    divided = ("data=2,tensor=2", "--zero", "parameters", "--sequence-parallel")
    assert run(tmp_path, *divided, "--load", "saved") == pytest.approx(further, rel=5e-3)
    assert further != pytest.approx(wanted, rel=0.01)


@pytest.mark.slow
@pytest.mark.exhaustive  # 8 workers
def test_the_example_runs_on_three_axes(tmp_path):
    wanted = run(tmp_path, "")
    assert run(tmp_path, "data=2,sequence=2", "--recompute", "1.0") == pytest.approx(wanted, rel=2e-3)
    assert run(tmp_path, "data=2,tensor=2,pipeline=2", "--zero", "gradients") == pytest.approx(wanted, rel=2e-3)
