"""Nothing that a job reads goes stale: at every call it gives what the plain function gives, or it is refused."""

import re

import adversarial_stale_modules as traps_stale_modules
import adversarial_stale_objects as traps_stale_objects
import adversarial_stale_process as traps_stale_process
import adversarial_stale_tensors as traps_stale_tensors
import adversarial_stale_values as traps_stale_values
import pytest
import torch
import torch.nn.functional as F
from adversarial_cases import Trap, assert_alike, run_captured, run_plainly
from torch import nn

from rankless.errors import CaptureError
from rankless.parallel.mesh import Mesh

TRAPS = [
    *traps_stale_values.TRAPS,
    *traps_stale_objects.TRAPS,
    *traps_stale_process.TRAPS,
    *traps_stale_modules.TRAPS,
    *traps_stale_tensors.TRAPS,
]
RIGHT = [trap for trap in TRAPS if trap.refused is None]
REFUSED = [trap for trap in TRAPS if trap.refused is not None]


@pytest.fixture(autouse=True)
def _what_scripts_change_is_put_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(F, "relu", F.relu)
    monkeypatch.setattr(nn.Tanh, "forward", nn.Tanh.forward)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_default_dtype(torch.float32)
    nn.modules.module._global_forward_hooks.clear()


@pytest.mark.parametrize("trap", RIGHT, ids=str)
def test_the_captured_job_gives_at_every_call_what_the_plain_function_gives(trap: Trap):
    wanted = run_plainly(trap)
    assert_alike(run_captured(Mesh.solo(), trap), wanted, trap.tolerance)


@pytest.mark.parametrize("trap", REFUSED, ids=str)
def test_the_job_is_refused_with_what_was_found_and_the_line(trap: Trap):
    with pytest.raises(CaptureError) as raised:
        run_captured(Mesh.solo(), trap)
    assert re.search(trap.refused, str(raised.value.found)), raised.value.found
    assert raised.value.where == trap.line()
