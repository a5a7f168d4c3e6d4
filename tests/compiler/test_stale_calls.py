"""Jobs that ask for what is another each time, or that change what they read, are refused with their line."""

import re

import pytest
import torch
from adversarial_cases import AdversarialCase, run_captured, started
from adversarial_stale_calls import CASES
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


@pytest.mark.parametrize("case", [*CASES, *PARTS, *WRITTEN], ids=str)
def test_the_job_is_refused_with_what_was_found_and_the_line(case: AdversarialCase):
    with pytest.raises(CaptureError) as raised:
        run_captured(Mesh.solo(), case)
    assert re.search(case.refused, str(raised.value.found)), raised.value.found
    assert raised.value.where == case.line()


@pytest.mark.parametrize("case", PARTS, ids=str)
def test_parts_of_the_step_are_refused_on_one_device_too(case: AdversarialCase):
    script, optimizer = started(case)
    world = World(mesh=Mesh.solo(), notify=lambda _: None, send_record=lambda _: None)
    job = make_job(script.function, model=script.modules, optimizer=optimizer, view="consistent", world=lambda: world)
    with pytest.raises(CaptureError) as raised:
        job(*script.batches[0])
    assert re.search(case.refused, str(raised.value.found))
    assert raised.value.where == case.line()
