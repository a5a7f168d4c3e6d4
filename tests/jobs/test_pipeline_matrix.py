"""Models in pipelines, on meshes with and without an axis `data`: `rankless verify` finds the same training."""

from itertools import product

import pytest
from mesh_runs import SETTINGS, verify

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
MESHES = {"pipeline=2": 2, "pipeline=3": 3, "pipeline=4": 4, "data=2,pipeline=2": 2}
"""Meshes, and how many workers are along their axis `pipeline`."""
LAYERS = {"lenet": 4, "gpt": 8, "bert": 8, "llama": 8, "towers": 4, "tagger": 3}
"""Models, and how many stages they can have at least: each has parameters of its own."""
PRODUCT = [
    (model, schedule, setting, mesh)
    for model, schedule, setting, mesh in product(LAYERS, SCHEDULES, SETTINGS, MESHES)
    if MESHES[mesh] * (2 if schedule == "interleaved" else 1) <= LAYERS[model]
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "schedule", "setting"),
    [
        ("towers", "pipeline=2", "zero-bubble", "accumulated"),
        pytest.param("gpt", "pipeline=2", "zero-bubble", "accumulated", marks=pytest.mark.exhaustive),
        pytest.param("towers", "data=2,pipeline=2", "interleaved", "recomputed", marks=pytest.mark.exhaustive),
    ],
)
def test_a_model_in_a_pipeline_is_the_same_training(tmp_path, model, mesh, schedule, setting):
    verify(tmp_path, mesh, "--model", model, "--schedule", schedule, *SETTINGS[setting])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "schedule", "setting", "mesh"), PRODUCT)
def test_every_model_schedule_and_mesh(tmp_path, model, schedule, setting, mesh):
    verify(tmp_path, mesh, "--model", model, "--schedule", schedule, *SETTINGS[setting])
