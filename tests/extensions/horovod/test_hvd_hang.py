"""The watchdog explains a hanging Horovod job like any other."""

from pathlib import Path

import pytest
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

SCRIPT = """
import time
import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(3, 3)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

def late():
    time.sleep(600)

for step in range(3):
    if step == 2 and hvd.rank() == 1:
        late()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
"""


def test_the_waiting_operation_and_the_missing_rank_are_named(tmp_path: Path):
    done = run_script(SCRIPT, "-n", "2", "--hang-timeout", "3", folder=tmp_path)
    assert done.returncode == 1
    assert "rank 1 did not arrive: it is in late() at script.py:11" in done.stderr
    assert "rank 0 waits in the step of hvd.DistributedOptimizer at script.py:17" in done.stderr
