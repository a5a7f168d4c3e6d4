"""Every collective gives what one process computes: all dtypes, on all ranks and on a group, 2, 3 and 4 processes.

The tests use Gloo, and NCCL too with a process on each GPU. With one GPU it has a group of one process.
"""

import pytest
import torch
from collectives.cases import CASES, missing_in_backend, require_expected, run_on_group
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import on_mesh

# irecv must name its sender, and a batch is of isend and irecv.
WAYS = [
    pytest.param(case, asynchronous, id=f"{case}{', async_op' * asynchronous}")
    for case in CASES
    for asynchronous in (False, True)
    if (case, asynchronous) not in [("send any", True), ("send batch", False)]
]
SHAPES = [(), (3,), (2, 0), (2, 3)]
GPUS = torch.cuda.device_count()
NEEDS_TWO_RANKS = ("gather", "gather uneven", "reduce", "scatter", "send")
"""Cases that name the second rank."""
WITH_NCCL = [way for way in WAYS if not missing_in_backend(*way.values, "nccl")]
if GPUS == 1:
    WITH_NCCL = [
        way for way in WITH_NCCL if not way.values[0].startswith(NEEDS_TWO_RANKS) or "reduce_" in way.values[0]
    ]
if not GPUS:
    why = "NCCL takes a GPU for each process, and there is none: the cases ran with Gloo only"
    WITH_NCCL = [pytest.param("all cases", False, marks=pytest.mark.skip(reason=why))]


@pytest.mark.ci_sample(14)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("whole", [True, False], ids=["all ranks", "a group"])
@pytest.mark.parametrize(("case", "asynchronous"), WAYS)
def test_a_collective_gives_what_one_process_computes(case: str, asynchronous: bool, whole: bool, size: int):
    answers = on_mesh(size, run_on_group, case, whole, asynchronous, SHAPES)
    require_expected(case, answers, SHAPES)


@pytest.mark.parametrize("whole", [True, False], ids=["all ranks", "a group"])
@pytest.mark.parametrize(("case", "asynchronous"), WITH_NCCL)
def test_a_collective_gives_the_same_with_nccl(case: str, asynchronous: bool, whole: bool):
    answers = on_mesh(min(GPUS, 4), run_on_group, case, whole, asynchronous, SHAPES, backend="nccl")
    require_expected(case, answers, SHAPES, "nccl")


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("case", [case for case in CASES if case != "send batch"])
@settings(max_examples=10, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=3))
def test_a_collective_takes_any_shape(case: str, shapes: list[tuple[int, ...]]):
    answers = on_mesh(3, run_on_group, case, True, False, shapes)
    require_expected(case, answers, shapes)
