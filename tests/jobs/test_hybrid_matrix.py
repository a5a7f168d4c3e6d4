"""Models on meshes that combine axes, and with sequence parallelism: `rankless verify` finds the same training."""

import pytest
from mesh_runs import SETTINGS, verify

MESHES = (
    ("pipeline=2,tensor=2", ()),
    ("pipeline=2,data=2,tensor=2", ()),
    ("data=2,tensor=2", ("--zero", "parameters")),
    ("data=2,tensor=2", ("--zero", "optimizer")),
    ("pipeline=2,data=2", ("--zero", "gradients")),
    ("tensor=2", ("--sequence-parallel",)),
    ("pipeline=2,tensor=2", ("--sequence-parallel",)),
    ("sequence=2", ()),
    ("data=2,sequence=2", ()),
    ("pipeline=2,sequence=2", ()),
    ("data=2,sequence=2", ("--zero", "parameters")),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "options", "setting"),
    [
        ("gpt", "pipeline=2,tensor=2", (), "sgd"),
        ("llama", "data=2,tensor=2", ("--zero", "parameters"), "accumulated"),
    ],
)
def test_a_model_on_combined_axes_is_the_same_training(tmp_path, model, mesh, options, setting):
    verify(tmp_path, mesh, "--model", model, *options, *SETTINGS[setting])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model", ["lenet", "gpt", "bert", "llama", "towers", "tagger"])
def test_every_model_setting_and_combination(tmp_path, model, setting, mesh, options):
    verify(tmp_path, mesh, "--model", model, *options, *SETTINGS[setting])
