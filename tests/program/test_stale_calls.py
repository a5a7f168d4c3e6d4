"""Jobs that ask for what is another each time, or that change what they read, are refused with their line."""

import re

import pytest
import torch
from traps import Trap, run_captured
from traps_stale_calls import TRAPS

from rankless.collectives.mesh import Mesh
from rankless.errors import CaptureError


@pytest.fixture(autouse=True)
def _gradients_are_switched_on_again():
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("trap", TRAPS, ids=str)
def test_the_job_is_refused_with_what_was_found_and_the_line(trap: Trap):
    with pytest.raises(CaptureError) as raised:
        run_captured(Mesh.solo(), trap)
    assert re.search(trap.refused, str(raised.value.found)), raised.value.found
    assert raised.value.where == trap.line()
