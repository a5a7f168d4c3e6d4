"""PyTorch's operator database: no case of any operator is wrong or crashes. `make soak` writes docs/scoreboard.md."""

import functools
import json
import os
import random
import warnings
from pathlib import Path

import pytest
import torch
from operator_brute_force import can_be_split
from operator_database import DatabaseCase, Split, cases_of, variants
from operator_scores import VariantScore, score

from rankless.torch_versions import find_torch_version

SCOREBOARD = "SCOREBOARD_JSONL"
"""The environment variable with the file for the counts, which `make soak` sets."""
CASES_IN_CI = 2
VARIANTS_IN_CI = ("H", "exp", "linalg.vander", "nn.functional.hardswish", "select_scatter")


@pytest.fixture(autouse=True)
def _restore_random_state():
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def assert_right(found: VariantScore) -> None:
    assert not found.failures, "\n".join(found.failures)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_all_cases_of_an_operator_are_right:
        metafunc.parametrize("variant", sorted(variants()))


@pytest.mark.parametrize("variant", VARIANTS_IN_CI)
@pytest.mark.ci_sample(2)
def test_a_few_cases_of_an_operator_are_right(variant: str):
    cases = list(cases_of(variant))
    chosen = random.Random(variant).sample(cases, min(CASES_IN_CI, len(cases)))
    assert_right(score(variant, chosen))


@pytest.mark.exhaustive
def test_all_cases_of_an_operator_are_right(variant: str):
    if variant in finished():
        return  # an interrupted soak with these rules has the counts
    found = score(variant, cases_of(variant))
    if SCOREBOARD in os.environ:
        with open(os.environ[SCOREBOARD], "a", encoding="utf-8") as file:
            file.write(json.dumps(found.row()) + "\n")
    assert_right(found)


@functools.cache
def finished() -> frozenset[str]:
    """Return the variants without failures in the file for the counts, as it was when this process began."""
    file = Path(os.environ.get(SCOREBOARD, os.devnull))
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return frozenset(row["variant"] for row in rows if not row["failures"])


def sample(variant: str, describe: str) -> DatabaseCase:
    return next(case for case in cases_of(variant) if case.is_thorough and case.describe().startswith(describe))


@pytest.mark.parametrize(
    ("variant", "arguments", "dims", "expected"),
    [
        ("add", "float64[5, 10, 5], float64[5, 10, 5]", (0, 0), True),
        ("add", "float64[5, 10, 5], float64[5, 10, 5]", (0, None), True),
        ("softmax", "float64[5, 10, 5], 2", (0,), True),
        ("softmax", "float64[5, 10, 5], 2", (2,), False),
        ("sum", "float64[3, 5]", (1,), True),
        ("cumsum", "float64[5, 5, 5], 0", (0,), False),
        ("matmul", "float64[5, 5, 10, 10], float64[5, 5, 10, 5]", (1, None), True),
        ("linalg.solve", "float64[2, 2, 5, 5], float64[2, 2, 5, 3]", (2, None), False),
    ],
)
@pytest.mark.ci_sample(3)
def test_brute_force_decides_what_can_be_split(variant, arguments, dims, expected):
    assert can_be_split(sample(variant, arguments), Split(dims)) is expected


@pytest.mark.parametrize(
    ("variant", "described", "kinds"),
    [
        ("linalg.solve_triangular", "complex128, contiguous, backward, sample 0", {"split", "gathered"}),
        ("index_reduce.prod", "float16, contiguous, backward, sample 2", {"gathered"}),
        ("polygamma.polygamma_n_0", "float64, contiguous, in place, sample 0", {"refused"}),
        ("resize_as_", "bfloat16, transposed, forward, sample 0", {"split"}),
        pytest.param(
            *("view_copy", "float64, transposed, backward, sample 0", {"split"}),
            marks=pytest.mark.skipif(
                find_torch_version().startswith("2.11"),
                reason="PyTorch 2.11 cannot trace the gradient of a copied view of a transposed tensor",
            ),
        ),
        ("nn.functional.multi_head_attention_forward", "bfloat16, contiguous, backward, sample 0", {"split"}),
        ("pow", "float16, contiguous, backward, sample 1", {"split"}),
        ("pca_lowrank", "float32, contiguous, backward, sample 1", {"split"}),
    ],
)
@pytest.mark.ci_sample(4)
def test_cases_that_the_soak_found_are_right(variant: str, described: str, kinds: set[str]):
    case = next(case for case in cases_of(variant) if str(case).startswith(f"{variant}, {described}:"))
    found = score(variant, [case])
    assert_right(found)
    assert {kind for _, _, _, kind, _ in found.counts} == kinds
