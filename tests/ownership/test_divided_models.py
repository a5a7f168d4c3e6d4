"""Models with divided states: `rankless verify` says that the training is the same."""

from functools import cache
from pathlib import Path

import pytest
import torch
from support.warm_runs import rankless

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


@cache
def can_train_lstm_in_bfloat16() -> bool:
    """Return whether plain PyTorch can: its kernel needs instructions that not every CPU has."""
    layer = torch.nn.LSTM(2, 2)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.ones(1, 1, 2))
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
        return False
    return True


def verify(folder: Path, workers: int, *arguments: str) -> None:
    if {"tagger", "--bfloat16"} <= set(arguments) and not can_train_lstm_in_bfloat16():
        pytest.skip("plain PyTorch has no LSTM in bfloat16 on this CPU")
    precision = () if "--bfloat16" in arguments else ("--dtype", "float64")
    found = rankless("verify", "-n", str(workers), *precision, str(SCRIPT), *arguments, folder=folder)
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
