"""Jobs that call impure functions or change what they read are refused with their line."""

import re

import pytest
import torch
from adversarial_cases import AdversarialCase, run_captured, start_script
from adversarial_stale_calls import CASES
from adversarial_training_calls import FILE_WRITES, TRAINING_CALLS
from support.devices import DEVICE

from rankless.context.world import World
from rankless.errors import CaptureError
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh


@pytest.fixture(autouse=True)
def _restore_grad_mode():
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("case", [*CASES, *TRAINING_CALLS, *FILE_WRITES], ids=str)
def test_the_job_is_refused_with_the_call_found_and_the_line(case: AdversarialCase):
    with pytest.raises(CaptureError) as raised:
        run_captured(Mesh.solo(DEVICE), case)
    assert re.search(case.refused, str(raised.value.found)), raised.value.found
    assert raised.value.where == case.line()


@pytest.mark.parametrize("case", TRAINING_CALLS, ids=str)
def test_training_calls_are_refused_on_one_device_too(case: AdversarialCase):
    script, optimizer = start_script(case)
    world = World(mesh=Mesh.solo(DEVICE), notify=lambda _: None, send_record=lambda _: None)
    job = make_job(script.function, model=script.modules, optimizer=optimizer, view="consistent", world=lambda: world)
    with pytest.raises(CaptureError) as raised:
        job(*script.batches[0])
    assert re.search(case.refused, str(raised.value.found))
    assert raised.value.where == case.line()
