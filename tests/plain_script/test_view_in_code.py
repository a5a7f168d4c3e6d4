"""A script asks for the logical view in code, divides batches that it makes itself, and may use `rankless.loader`."""

import subprocess
from pathlib import Path

import pytest
import torch
from plain_script.test_single_process import run_plain
from support.warm_runs import run_script

import rankless

pytestmark = pytest.mark.slow

MADE_BATCHES = """
import torch
from torch import nn
{start}
torch.manual_seed(4)
torch.set_default_dtype(torch.float64)
x = torch.linspace(-1, 1, 42)[:, None]
y = x ** 2
model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    inputs, targets = {batch}
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    print(f"{{loss.item():.12f}}")
{end}
"""
WHOLE = MADE_BATCHES.format(start="", batch="(x, y)", end="")
SHARDED = MADE_BATCHES.format(start="import rankless", batch="rankless.shard_batch((x, y))", end="print(type(inputs))")
LOADED = """
import torch, rankless
from torch import nn
torch.manual_seed(4)
torch.set_default_dtype(torch.float64)
rows = torch.utils.data.TensorDataset(torch.randn(22, 3), torch.randn(22, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(2):
    for inputs, targets in rankless.loader(rows, batch_size=5, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.12f}", inputs.shape)
"""
ADVICE = "divide a batch with x = rankless.shard_batch(x)"


def run(text: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script on two workers."""
    return run_script(text, "-n", "2", "--devices", "cpu", *options, folder=folder)


def test_a_script_without_a_loader_runs_whole_and_gets_one_notice(tmp_path: Path):
    job = run(WHOLE, tmp_path)
    assert job.returncode == 0, job.stderr
    assert job.stdout == run_plain(tmp_path).stdout
    assert job.stderr.count(ADVICE) == 1
    assert "rankless: script.py:15: every worker computes whole batches" in job.stderr


def test_shard_batch_divides_what_a_script_makes_itself(tmp_path: Path):
    job = run(SHARDED, tmp_path)
    assert job.returncode == 0, job.stderr
    assert "script.py knows no ranks: one training" in job.stderr
    assert ADVICE not in job.stderr
    *lines, kind = job.stdout.splitlines()
    assert kind == "<class 'rankless.logical_view.tensor.DividedTensor'>"
    *expected, kind = run_plain(tmp_path).stdout.splitlines()
    assert lines == expected
    assert kind == "<class 'torch.Tensor'>"


def test_batches_that_differ_between_workers_are_refused(tmp_path: Path):
    rank = "json.loads(os.environ['RANKLESS_WORKER_PLAN'])['rank']"
    job = run("import json, os" + SHARDED.replace("shard_batch((x, y))", f"shard_batch((x + {rank}, y))"), tmp_path)
    assert job.returncode == 1
    assert "RanksDiverged" in job.stderr


def test_a_loop_over_a_loader_of_rankless_divides_its_batches(tmp_path: Path):
    job = run(LOADED, tmp_path)
    assert job.returncode == 0, job.stderr
    assert "script.py knows no ranks: one training" in job.stderr
    assert job.stdout == run_plain(tmp_path).stdout
    assert ADVICE not in job.stderr


@pytest.mark.exhaustive
def test_a_script_that_uses_torch_distributed_may_ask_for_the_view(tmp_path: Path):
    start = "import rankless, torch.distributed as dist\nprint(dist.is_initialized())\nrankless.logical()"
    text = MADE_BATCHES.format(start=start, batch="(x, y)", end="rankless.logical()")
    job = run(text, tmp_path)
    assert job.returncode == 0, job.stderr
    assert "script.py asks for the logical view: one training, its batches divided between 2 workers" in job.stderr
    assert job.stdout == run_plain(tmp_path).stdout
    copies = run(text, tmp_path, "--separate")
    assert copies.returncode == 1
    assert "2 workers, each of which runs a copy of it" in copies.stderr
    assert "rankless run --logical" in copies.stderr


def test_on_one_process_they_change_nothing():
    rankless.logical()
    batch = {"x": torch.ones(4, 2), "name": "a"}
    assert rankless.shard_batch(batch) is batch
