"""Nothing that a job reads goes stale: every call equals the plain function's, or is refused."""

import re

import adversarial_stale_modules
import adversarial_stale_objects
import adversarial_stale_process
import adversarial_stale_tensors
import adversarial_stale_values
import pytest
import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, assert_alike, run_captured, run_plain
from support.devices import DEVICE
from torch import nn

from rankless.errors import CaptureError
from rankless.parallel.mesh import Mesh

CASES = [
    *adversarial_stale_values.CASES,
    *adversarial_stale_objects.CASES,
    *adversarial_stale_process.CASES,
    *adversarial_stale_modules.CASES,
    *adversarial_stale_tensors.CASES,
]
SUPPORTED = [case for case in CASES if case.refused is None]
REFUSED = [case for case in CASES if case.refused is not None]


@pytest.fixture(autouse=True)
def _restore_global_state(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(F, "relu", F.relu)
    monkeypatch.setattr(nn.Tanh, "forward", nn.Tanh.forward)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_default_dtype(torch.float32)
    nn.modules.module._global_forward_hooks.clear()


@pytest.mark.ci_sample(15)
@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_every_call_of_the_captured_job_equals_the_plain_function(case: AdversarialCase):
    expected = run_plain(case)
    assert_alike(run_captured(Mesh.solo(DEVICE), case), expected, case.tolerance)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_the_job_is_refused_with_the_cause_and_the_line(case: AdversarialCase):
    with pytest.raises(CaptureError) as raised:
        run_captured(Mesh.solo(DEVICE), case)
    assert re.search(case.refused, str(raised.value.found)), raised.value.found
    assert raised.value.where == case.line()
