"""Eight models on nine meshes: `rankless verify` finds the same training.

Together with test_pipeline_matrix.py, which has the schedules of pipelines.
"""

import pytest
from mesh_runs import SETTINGS, verify

MODELS = ("lenet", "gpt", "bert", "llama", "t5", "vit", "towers", "mixture")
MESHES = (
    ("tensor=4", ()),
    ("data=2,tensor=2", ()),
    ("pipeline=4", ()),
    ("pipeline=2,data=2", ()),
    ("pipeline=2,tensor=2", ()),
    ("data=2,tensor=2,pipeline=2", ()),
    ("expert=2,data=2", ()),
    ("sequence=2,data=2", ()),
    ("data=2,tensor=2", ("--zero", "parameters")),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "options", "setting"),
    [
        ("mixture", "expert=2,data=2", (), "accumulated"),
        ("t5", "pipeline=2,tensor=2", (), "plain"),
    ],
)
def test_a_model_on_a_mesh_is_the_same_training(tmp_path, model, mesh, options, setting):
    verify(tmp_path, mesh, "--model", model, *options, *SETTINGS[setting])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_setting_and_mesh(tmp_path, model, setting, mesh, options):
    verify(tmp_path, mesh, "--model", model, *options, *SETTINGS[setting])
