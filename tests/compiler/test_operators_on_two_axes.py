"""PyTorch's operator database on meshes of two axes: rules that know one axis are right for several at once."""

import random
import warnings

import pytest
import torch
from operator_database import FINE_DTYPES, DatabaseCase, Split, cases_of, variants
from operator_outcomes import AxesDivision, classify, divisions_on_two_axes

CASES_IN_CI = 2
VARIANTS_IN_CI = ("H", "floor", "msort", "randint")
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_many_cases_of_an_operator_are_right_on_two_axes:
        metafunc.parametrize("variant", sorted(variants()))


@pytest.mark.parametrize("variant", VARIANTS_IN_CI)
@pytest.mark.ci_sample(2)
def test_a_few_cases_of_an_operator_are_right_on_two_axes(variant: str):
    assert_right(variant, CASES_IN_CI)


@pytest.mark.exhaustive
def test_many_cases_of_an_operator_are_right_on_two_axes(variant: str):
    assert_right(variant, CASES_IN_CI)
    assert_right(variant, MAX_CASES)


@pytest.mark.parametrize(
    ("variant", "described", "kind"),
    [
        ("prod", "complex128, contiguous, backward, sample 0", "gathered"),
        ("softmax", "float64, contiguous, backward, sample 0", "split"),
        ("masked.softmax", "float64, contiguous, backward, sample 0", "split"),
    ],
)
@pytest.mark.ci_sample(2)
def test_one_dim_on_both_axes_is_right(variant: str, described: str, kind: str):
    case = next(case for case in cases_of(variant) if str(case).startswith(f"{variant}, {described}:"))
    found = dict(classify(case, list_divisions_of_one_dim))
    assert {result.kind for result in found.values()} == {kind}, found


def list_divisions_of_one_dim(case: DatabaseCase) -> list[AxesDivision]:
    return [AxesDivision((split, split)) for split in case.splits() if is_long_enough(case, split)]


def is_long_enough(case: DatabaseCase, split: Split) -> bool:
    pairs = zip(case.tensors, split.dims, strict=True)
    return all(dim is None or item.shape[dim] >= 4 for item, dim in pairs)
