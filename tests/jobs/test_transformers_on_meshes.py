"""Models of transformers, unchanged, on meshes that divide them: `rankless verify` finds the same training."""

from pathlib import Path

import pytest
from support.warm_runs import TRANSFORMERS, rankless

SCRIPT = Path(__file__).parent / "scripts" / "train_transformers.py"
MODELS = ("gpt2", "bert", "llama", "t5", "vit")
MESHES = ("tensor=2", "pipeline=2", "sequence=2", "pipeline=2,tensor=2")
IN_CI = {("t5", "pipeline=2"), ("llama", "sequence=2")}


def list_cases():
    for model in MODELS:
        for mesh in MESHES:
            marks = () if (model, mesh) in IN_CI else pytest.mark.exhaustive
            yield pytest.param(model, mesh, marks=marks)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), list(list_cases()))
def test_a_model_of_transformers_is_the_same_training(tmp_path, model, mesh):
    options = ("--mesh", mesh, "--dtype", "float64")
    found = rankless("verify", *options, str(SCRIPT), "--model", model, folder=tmp_path, preload=TRANSFORMERS)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "same training" in found.stdout
