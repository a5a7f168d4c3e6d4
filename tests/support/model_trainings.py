"""Comparisons of the models of train_models.py, as `rankless verify` makes them."""

from functools import cache
from pathlib import Path

import pytest
import torch
from support.warm_runs import TRANSFORMERS, rankless

SCRIPTS = Path(__file__).parents[1] / "ownership" / "scripts"
OF_TRANSFORMERS = frozenset({"bert", "llama", "t5", "vit"})
"""The models that are those of transformers."""


def verify(folder: Path, workers: tuple[str, str], *arguments: str) -> None:
    """Assert that a model is the same training on several workers and on one device.

    Args:
        folder: The folder in which to run.
        workers: Options, such as `("--mesh", "tensor=2")` or `("-n", "3")`.
        arguments: Those of train_models.py.
    """
    if {"tagger", "--bfloat16"} <= set(arguments) and not can_train_lstm_in_bfloat16():
        pytest.skip("plain PyTorch has no LSTM in bfloat16 on this CPU")
    precision = () if "--bfloat16" in arguments else ("--dtype", "float64")
    preload = TRANSFORMERS if OF_TRANSFORMERS & set(arguments) else ()
    command = ("verify", *workers, *precision, str(SCRIPTS / "train_models.py"), *arguments)
    found = rankless(*command, folder=folder, preload=preload)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "same training" in found.stdout


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
