"""Jobs that ask for what is another each time, or that change what they read, are refused with their line."""

import re

import pytest
import torch
from adversarial_cases import Trap, run_captured, started
from adversarial_stale_calls import TRAPS
from adversarial_training_calls import PARTS, WRITTEN

from rankless.context.world import World
from rankless.errors import CaptureError
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh


@pytest.fixture(autouse=True)
def _gradients_are_switched_on_again():
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("trap", [*TRAPS, *PARTS, *WRITTEN], ids=str)
def test_the_job_is_refused_with_what_was_found_and_the_line(trap: Trap):
    with pytest.raises(CaptureError) as raised:
        run_captured(Mesh.solo(), trap)
    assert re.search(trap.refused, str(raised.value.found)), raised.value.found
    assert raised.value.where == trap.line()


@pytest.mark.parametrize("trap", PARTS, ids=str)
def test_parts_of_the_step_are_refused_on_one_device_too(trap: Trap):
    script, optimizer = started(trap)
    world = World(mesh=Mesh.solo(), notify=lambda _: None, send_record=lambda _: None)
    job = make_job(script.function, model=script.modules, optimizer=optimizer, view="consistent", world=lambda: world)
    with pytest.raises(CaptureError) as raised:
        job(*script.batches[0])
    assert re.search(trap.refused, str(raised.value.found))
    assert raised.value.where == trap.line()
