"""Every collective gives what one process computes: all dtypes, on all ranks and on a group, 2, 3 and 4 processes."""

import pytest
from collectives.table import CASES, on_group, require_right
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import on_mesh

# irecv must name its sender, and a batch is of isend and irecv.
WAYS = [
    pytest.param(case, asynchronous, id=f"{case}{', async_op' * asynchronous}")
    for case in CASES
    for asynchronous in (False, True)
    if (case, asynchronous) not in [("send any", True), ("send batch", False)]
]
SHAPES = [(), (3,), (2, 0), (2, 3)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("whole", [True, False], ids=["all ranks", "a group"])
@pytest.mark.parametrize(("case", "asynchronous"), WAYS)
def test_a_collective_gives_what_one_process_computes(case: str, asynchronous: bool, whole: bool, size: int):
    answers = on_mesh(size, on_group, case, whole, asynchronous, SHAPES)
    require_right(case, answers, SHAPES)


@pytest.mark.parametrize("case", [case for case in CASES if case != "send batch"])
@settings(max_examples=10, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=3))
def test_a_collective_takes_any_shape(case: str, shapes: list[tuple[int, ...]]):
    answers = on_mesh(3, on_group, case, True, False, shapes)
    require_right(case, answers, shapes)
