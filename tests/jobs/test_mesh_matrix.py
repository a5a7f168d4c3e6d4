"""Models on meshes that divide them: `rankless verify` finds the same training.

The schedules of pipelines are in test_pipeline_matrix.py.
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
    ("pipeline=2,expert=2", ()),
)
MORE_MESHES = (
    ("tensor=2", ()),
    ("sequence=2", ()),
    ("tensor=2", ("--sequence-parallel",)),
    ("pipeline=2,tensor=2", ("--sequence-parallel",)),
    ("pipeline=2,sequence=2", ()),
    ("expert=2,tensor=2", ()),
    ("data=2,tensor=2", ("--zero", "optimizer")),
    ("pipeline=2,data=2", ("--zero", "gradients")),
    ("pipeline=2,data=2", ("--zero", "parameters")),
    ("pipeline=2,data=2,tensor=2", ("--zero", "parameters")),
    ("pipeline=2,data=2,expert=2", ()),
    ("data=2,sequence=2", ("--zero", "parameters")),
    ("data=2,expert=2", ("--zero", "parameters")),
)


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "options", "setting"),
    [
        ("towers", "data=2,tensor=2", (), "sgd"),
        ("lenet", "data=2,tensor=2", (), "bfloat16"),
        ("gpt", "pipeline=2,tensor=2", (), "sgd"),
        ("mixture", "data=2,expert=2", (), "plain"),
        ("loop", "expert=2,tensor=2", (), "accumulated"),
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "options"), MORE_MESHES, ids=str)
@pytest.mark.parametrize("setting", ["plain", "accumulated"])
@pytest.mark.parametrize("model", [*MODELS, "tagger"])
def test_every_model_on_more_meshes(tmp_path, model, setting, mesh, options):
    verify(tmp_path, mesh, "--model", model, *options, *SETTINGS[setting])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("expert=3", ()),
        ("expert=2,data=2", ()),
        ("expert=2,tensor=2", ("--sequence-parallel",)),
        ("expert=2,data=2", ("--zero", "parameters")),
        ("expert=2,sequence=2", ()),
        ("pipeline=2,data=2", ()),
        ("pipeline=2,expert=2", ()),
        ("pipeline=2,data=2,expert=2", ("--zero", "parameters")),
    ],
    ids=str,
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_experts_that_are_modules(tmp_path, setting, mesh, options):
    verify(tmp_path, mesh, "--model", "loop", *options, *SETTINGS[setting])
