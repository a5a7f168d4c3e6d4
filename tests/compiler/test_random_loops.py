"""Random programs as ordinary loops in the logical view, as programs of jobs, and in plain PyTorch.

Hypothesis generates the programs, which are those of the compiler's tests. Each loop makes three steps with momentum,
and reads values of some steps as a script does. A second executor runs the loops below autograd, operator by operator.
"""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from logical.operator_tensor import OperatorTensor, gather_gradients, get_whole
from logical.test_logical_view import divide
from simulated_ranks import assert_same_as_plain
from support.processes import on_mesh
from test_random_programs import BOUND, QUIET, PlainProgram, RandomProgram, programs
from torch import Tensor

from rankless.logical_view.gradients import LogicalBackward
from rankless.logical_view.tensor import DividedTensor, LogicalView
from rankless.parallel.mesh import Mesh

pytestmark = pytest.mark.slow

STEPS = 3
LOOP_BOUND = 1e-9
"""Three steps amplify the rounding that the first program has passed."""


def train(program: RandomProgram, batch: Any) -> list[Tensor]:
    """Return losses, values that Python reads, and the model's final state, of an ordinary loop."""
    plain = PlainProgram(program)
    parameters = [*plain.model.parameters(), *plain.parts.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    found: list[Tensor] = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss, last = plain.loss(batch * (1 + number / 7))
        loss.backward()
        gather_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, 10.0)
        optimizer.step()
        found += [torch.tensor(loss.item()), torch.tensor(get_whole(last).tolist())]
    states = [*plain.model.state_dict().values(), *plain.parts.state_dict().values()]
    return [*found, *(item.detach().clone().double() for item in states)]


def run_loops(mesh: Mesh, program: RandomProgram) -> list[list[Tensor]]:
    """Return the results of both executors."""
    view, found = LogicalView(mesh, lambda _: None), []
    torch.set_default_dtype(torch.float64)
    try:
        for above, install in ((True, LogicalBackward(view).install), (False, contextlib.nullcontext)):
            batch = divide(PlainProgram(program).batch, view)
            assert isinstance(batch, DividedTensor)
            with install():
                torch.manual_seed(program.seed)
                found.append(train(program, batch if above else OperatorTensor(batch)))
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def check(program: RandomProgram, *, with_job: bool) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        plain = PlainProgram(program)
        assume(plain.is_decidable())
        if with_job:
            modules = {"model": plain.model, "parts": plain.parts}
            assert_same_as_plain(lambda x: plain.loss(x), modules, [plain.batch], program.ranks, BOUND)
        torch.manual_seed(program.seed)
        expected = train(program, PlainProgram(program).batch)
    finally:
        torch.set_default_dtype(torch.float32)
    for found in itertools.chain(*on_mesh(min(program.ranks, 3), run_loops, program)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
            torch.testing.assert_close(one, other, rtol=0, atol=LOOP_BOUND * scale, equal_nan=True)


@settings(QUIET, max_examples=2, derandomize=True)
@given(programs())
def test_a_random_loop_trains_as_on_one_device(program: RandomProgram) -> None:
    check(program, with_job=False)


@pytest.mark.exhaustive
@settings(QUIET, max_examples=300)
@given(programs())
def test_random_loops_jobs_and_plain_pytorch_agree(program: RandomProgram) -> None:
    check(program, with_job=True)
