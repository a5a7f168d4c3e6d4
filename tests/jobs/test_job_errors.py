"""An error in a job's own code shows the script's lines, on one worker and on several."""

from pathlib import Path

import pytest
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

SCRIPT = """
import torch, rankless
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.last = nn.Linear({features}, 4)

    def forward(self, x):
        hidden = self.words(x).flatten(1)
        return self.last(hidden)

net = Net()

@rankless.job(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
def train(x, y):
    return F.cross_entropy(net(x), y)

for largest in (10, 10, 11):
    train(torch.full((6, 3), largest - 1), torch.zeros(6, dtype=torch.int64))
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_shape_error_shows_only_lines_of_the_script(workers: str, tmp_path: Path):
    job = run_script(SCRIPT.format(features=12), "-n", workers, folder=tmp_path)
    assert job.returncode == 1
    text = job.stderr[job.stderr.index("raised RuntimeError") :]
    assert "return F.cross_entropy(net(x), y)" in text
    assert "return self.last(hidden)" in text
    assert "torch/" not in text
    assert "fake" not in job.stdout + job.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_labels_of_int32_are_refused_with_the_conversion(workers: str, tmp_path: Path):
    text = SCRIPT.format(features=24).replace("dtype=torch.int64", "dtype=torch.int32")
    job = run_script(text, "-n", workers, folder=tmp_path)
    assert job.returncode == 1
    assert "raised DataError" in job.stderr
    assert "labels.long() for a tensor" in job.stderr
    assert "script.py:20" in job.stderr


SHARDED = """
import torch, torch.distributed as dist, rankless
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
fully_shard(model)

@rankless.job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1){options})
def train(x):
    return model(x).square().mean()

train(torch.ones(4, 4))
"""


@pytest.mark.parametrize("options", ["", ", capture=False", ", view='mirrored'"])
def test_a_model_that_fully_shard_has_divided_is_refused_with_a_fix(tmp_path: Path, options: str):
    job = run_script(SHARDED.format(options=options), "-n", "2", folder=tmp_path)
    assert job.returncode != 0
    assert "found:    model.bias, a DTensor, as fully_shard" in job.stderr
    assert "remove that call, and pass zero='parameters'" in job.stderr


def test_an_operator_error_in_a_program_names_the_line_of_the_script(tmp_path: Path):
    job = run_script(SCRIPT.format(features=24), "-n", "2", folder=tmp_path)
    assert job.returncode == 1
    assert "raised IndexError: index out of range in self" in job.stderr
    assert "in the job's line" in job.stderr
    assert "script.py:13: hidden = self.words(x).flatten(1)" in job.stderr
