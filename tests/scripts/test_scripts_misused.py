"""Mistakes in scripts raise errors that name the mistake."""

from pathlib import Path

import pytest
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

OTHER_PARTS = """
import torch, rankless

pairs = torch.utils.data.TensorDataset(torch.zeros(40, 3), torch.ones(40, 3))
for zeros, ones in rankless.loader(pairs, batch_size=10):
    if rankless.rank() == 0:
        print("zeros:", zeros.sum().item())
    else:
        ones.sum()
"""


def test_ranks_that_use_other_parts_of_a_batch_raise(tmp_path: Path) -> None:
    job = run_script(OTHER_PARTS, "-n", "2", "--devices", "cpu", folder=tmp_path)
    assert job.returncode == 1
    assert "expected: the same batch, and the same part of it, on every rank" in job.stderr
