"""Models on meshes with the axis `tensor`: `rankless verify` finds the same training."""

from pathlib import Path

import pytest
from support.warm_runs import rankless

MODELS = Path(__file__).parents[1] / "ownership" / "scripts" / "train_models.py"
SETTINGS = {
    "plain": (),
    "sgd": ("--optimizer", "sgd", "--clip", "0.1"),
    "muon": ("--optimizer", "muon"),
    "accumulated": ("--accumulate", "2", "--clip", "0.1"),
    "recomputed": ("--recompute", "1.0", "--random", "counter"),
    "bfloat16": ("--bfloat16",),
}
MESHES = ("tensor=2", "tensor=4", "data=2,tensor=2")


def verify(folder: Path, mesh: str, *arguments: str) -> None:
    precision = () if "--bfloat16" in arguments else ("--dtype", "float64")
    found = rankless("verify", "--mesh", mesh, *precision, str(MODELS), *arguments, folder=folder)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "same training" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "setting"), [("gpt", "tensor=2", "accumulated"), ("lenet", "data=2,tensor=2", "bfloat16")]
)
def test_a_model_with_divided_features_is_the_same_training(tmp_path, model, mesh, setting):
    verify(tmp_path, mesh, "--model", model, *SETTINGS[setting])


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model", ["lenet", "gpt", "bert", "llama", "towers", "tagger"])
def test_every_model_setting_and_mesh(tmp_path, model, setting, mesh):
    verify(tmp_path, mesh, "--model", model, *SETTINGS[setting])
