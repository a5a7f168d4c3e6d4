"""Models on meshes with the axis `tensor`: `rankless verify` finds the same training."""

import pytest
from mesh_runs import SETTINGS, verify

MESHES = ("tensor=2", "tensor=4", "data=2,tensor=2")


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
