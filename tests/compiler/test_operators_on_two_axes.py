"""PyTorch's operator database on meshes of two axes: rules that know one axis are right for several at once."""

import random
import warnings

import pytest
import torch
from operator_database import FINE_DTYPES, VARIANTS, DatabaseCase, cases_of
from operator_outcomes import classify, divisions_on_two_axes

CASES_IN_CI = 2
MAX_CASES = 8


@pytest.fixture(autouse=True)
def _restore_random_state():
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def assert_right(variant: str, count: int) -> None:
    """Assert that a random choice of an operator's cases in double precision is right on two axes."""
    cases: list[DatabaseCase] = [case for case in cases_of(variant) if case.dtype in FINE_DTYPES]
    for case in random.Random(variant).sample(cases, min(count, len(cases))):
        for division, result in classify(case, divisions_on_two_axes):
            assert result.kind not in ("wrong", "crashed"), f"{case}, {division}: {result.reason}"


@pytest.mark.ci_sample(8)
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_few_cases_of_an_operator_are_right_on_two_axes(variant: str):
    assert_right(variant, CASES_IN_CI)


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_many_cases_of_an_operator_are_right_on_two_axes(variant: str):
    assert_right(variant, MAX_CASES)
