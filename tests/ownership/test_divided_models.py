"""Models with divided states: `rankless verify` says that the training is the same."""

from pathlib import Path

import pytest
from support.warm_runs import TRANSFORMERS, rankless

SCRIPT = Path(__file__).parent / "scripts" / "train_models.py"
MODELS = ("lenet", "gpt", "bert", "llama", "towers", "tagger")
LEVELS = ("optimizer", "gradients", "parameters")
SETTINGS = {
    "sgd": ("--optimizer", "sgd"),
    "adamw": (),
    "adafactor": ("--optimizer", "adafactor"),
    "muon": ("--optimizer", "muon"),
    "clipped": ("--clip", "0.1"),
    "accumulated": ("--accumulate", "2"),
    "bfloat16": ("--bfloat16",),
    "all together": ("--clip", "0.1", "--accumulate", "2", "--optimizer", "sgd"),
}


def verify(folder: Path, workers: int, *arguments: str) -> None:
    precision = () if "--bfloat16" in arguments else ("--dtype", "float64")
    preload = TRANSFORMERS if {"bert", "llama"} & set(arguments) else ()
    found = rankless("verify", "-n", str(workers), *precision, str(SCRIPT), *arguments, folder=folder, preload=preload)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "same training" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "zero", "setting"),
    [
        ("gpt", "parameters", "clipped"),
        ("towers", "gradients", "muon"),
    ],
)
def test_a_model_with_divided_states_is_the_same_training(tmp_path, model, zero, setting):
    verify(tmp_path, 2, "--model", model, "--zero", zero, *SETTINGS[setting])


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("zero", LEVELS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_setting_and_number_of_workers(tmp_path, model, zero, setting, workers):
    verify(tmp_path, workers, "--model", model, "--zero", zero, *SETTINGS[setting])
