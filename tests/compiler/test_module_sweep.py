"""No class of `torch.nn` is silently wrong in a job: each mode, with and without gradients, autocast and masks."""

import itertools
import random
import warnings

import pytest
import torch
from module_sweep import BASES, NEEDS_GROUP, SAME_AS, cases_of, modules, sweep
from torch import nn

NOT_CAPTURED = ("CrossMapLRN2d",)
"""Modules of which no case is a program: PyTorch writes this one as an autograd function in Python."""


@pytest.fixture(autouse=True)
def _restore_random_state():
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", modules())


def test_each_class_of_torch_nn_is_swept():
    classes = {name for name, item in vars(nn).items() if isinstance(item, type) and issubclass(item, nn.Module)}
    assert classes == {*modules(), *BASES, *SAME_AS, *NEEDS_GROUP}


@pytest.mark.exhaustive
def test_a_few_cases_of_a_module_are_right(name: str):
    chosen = random.Random(name).sample(list(cases_of(name)), 2)
    assert not sweep(iter(chosen)).failures


@pytest.mark.exhaustive
def test_all_cases_of_a_module_are_right(name: str):
    counts = sweep(cases_of(name))
    assert not counts.failures, "\n".join(itertools.islice(counts.failures, 20))
    assert bool(counts.kinds["right"]) == (name not in NOT_CAPTURED), counts.kinds
