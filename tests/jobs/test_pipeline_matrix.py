"""Models in pipelines, on meshes with and without an axis `data`: `rankless verify` finds the same training."""

from itertools import product
from pathlib import Path

import pytest
from support.warm_runs import rankless

MODELS = Path(__file__).parents[1] / "ownership" / "scripts" / "train_models.py"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
SETTINGS = {
    "plain": (),
    "sgd": ("--optimizer", "sgd", "--clip", "0.1"),
    "muon": ("--optimizer", "muon"),
    "accumulated": ("--accumulate", "2", "--clip", "0.1"),
    "recomputed": ("--recompute", "1.0", "--random", "counter"),
    "bfloat16": ("--bfloat16",),
}
MESHES = {"pipeline=2": 2, "pipeline=3": 3, "pipeline=4": 4, "data=2,pipeline=2": 2}
"""Meshes, and how many workers are along their axis `pipeline`."""
LAYERS = {"lenet": 4, "gpt": 8, "bert": 8, "llama": 8, "towers": 4, "tagger": 3}
"""Models, and how many stages they can have at least: each has parameters of its own."""
PRODUCT = [
    (model, schedule, setting, mesh)
    for model, schedule, setting, mesh in product(LAYERS, SCHEDULES, SETTINGS, MESHES)
    if MESHES[mesh] * (2 if schedule == "interleaved" else 1) <= LAYERS[model]
]


def verify(folder: Path, mesh: str, *arguments: str) -> None:
    precision = () if "--bfloat16" in arguments else ("--dtype", "float64")
    found = rankless("verify", "--mesh", mesh, *precision, str(MODELS), *arguments, folder=folder)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "same training" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "schedule", "setting"),
    [
        ("gpt", "pipeline=2", "zero-bubble", "accumulated"),
        ("towers", "data=2,pipeline=2", "interleaved", "recomputed"),
    ],
)
def test_a_model_in_a_pipeline_is_the_same_training(tmp_path, model, mesh, schedule, setting):
    verify(tmp_path, mesh, "--model", model, "--schedule", schedule, *SETTINGS[setting])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "schedule", "setting", "mesh"), PRODUCT)
def test_every_model_schedule_and_mesh(tmp_path, model, schedule, setting, mesh):
    verify(tmp_path, mesh, "--model", model, "--schedule", schedule, *SETTINGS[setting])
