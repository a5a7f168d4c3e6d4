"""Models with divided states: `rankless verify` says that the training is the same."""

import pytest
from support.model_trainings import verify

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


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "zero", "setting"),
    [
        ("gpt", "parameters", "clipped"),
        ("towers", "gradients", "muon"),
    ],
)
def test_a_model_with_divided_states_is_the_same_training(tmp_path, model, zero, setting):
    verify(tmp_path, ("-n", "2"), "--model", model, "--zero", zero, *SETTINGS[setting])


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("zero", LEVELS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_setting_and_number_of_workers(tmp_path, model, zero, setting, workers):
    verify(tmp_path, ("-n", str(workers)), "--model", model, "--zero", zero, *SETTINGS[setting])
