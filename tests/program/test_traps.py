"""Every trap of capture: the job does what the plain script does, or is refused with the line of the script."""

import re

import pytest
import torch
import traps_autograd
import traps_modules
import traps_python_state
import traps_values
from processes import on_mesh
from traps import Trap, assert_alike, run_captured, run_plainly

from rankless.collectives.mesh import Mesh
from rankless.errors import CaptureError

TRAPS = [*traps_python_state.TRAPS, *traps_autograd.TRAPS, *traps_modules.TRAPS, *traps_values.TRAPS]
RIGHT = [trap for trap in TRAPS if trap.refused is None]
REFUSED = [trap for trap in TRAPS if trap.refused is not None]
WORKERS = 2
# A refusal is told from the caller's frame, which for these is PyTorch's own `handle_torch_function`.
NOT_YET_REFUSED = {"print_of_the_loss", "loss_formatted_as_text"}


@pytest.fixture(autouse=True)
def _random_state_is_put_back():
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("trap", RIGHT, ids=str)
def test_the_captured_job_does_what_the_plain_script_does(trap: Trap):
    wanted = run_plainly(trap)
    assert_alike(run_captured(Mesh.solo(), trap), wanted, trap.tolerance)


# Sums over rows are rounded to bfloat16 on each rank, so parts of a batch round otherwise than the whole.
ROUNDED_IN_PARTS = {"autocast_inside"}


def expected_to_fail(trap: Trap):
    """A trap as a parameter; one that is not refused yet must fail until it is, then this list must shrink."""
    marks = [pytest.mark.xfail(strict=True)] if str(trap) in NOT_YET_REFUSED else []
    return pytest.param(trap, marks=marks, id=str(trap))


@pytest.mark.parametrize("trap", map(expected_to_fail, REFUSED))
def test_the_job_is_refused_with_what_was_found_and_the_line(trap: Trap):
    with pytest.raises(CaptureError) as raised:
        run_captured(Mesh.solo(), trap)
    assert re.search(trap.refused, str(raised.value.found)), raised.value.found
    assert raised.value.where == trap.line()


@pytest.mark.slow
@pytest.mark.parametrize("trap", [trap for trap in RIGHT if str(trap) not in ROUNDED_IN_PARTS], ids=str)
def test_on_two_workers_every_rank_does_what_the_plain_script_does(trap: Trap):
    wanted = run_plainly(trap)
    for calls in on_mesh(WORKERS, run_captured, trap):
        assert_alike(calls, wanted, trap.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("trap", [trap for trap in REFUSED if str(trap) not in NOT_YET_REFUSED][::4], ids=str)
def test_on_two_workers_the_job_is_refused_as_on_one(trap: Trap):
    with pytest.raises(CaptureError) as raised:
        on_mesh(WORKERS, run_captured, trap)
    assert re.search(trap.refused, str(raised.value.found)), raised.value.found
    assert raised.value.where == trap.line()
