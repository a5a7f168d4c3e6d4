"""The participants of a run hear of a plain script's steps: its progress shows one device's losses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import run_script

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(40, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        last = F.mse_loss(model(inputs), targets)
        print(f"after {last.item():.3f}", flush=True)
    for inputs, _ in loader:
        model(inputs)
"""
FIRST = (
    "optimizer.zero_grad()\n        loss = F.mse_loss(model(inputs), targets)\n        print(f'loss {loss.item():.4f}')"
)


def test_progress_shows_the_losses_of_one_device(tmp_path: Path) -> None:
    plain = SCRIPT.replace("optimizer.zero_grad()", FIRST)
    alone = subprocess.run([sys.executable, "-c", plain], cwd=tmp_path, capture_output=True, text=True, check=True)
    losses = re.findall(r"^loss (.*)$", alone.stdout, re.MULTILINE)
    assert len(losses) == 10
    run = run_script(SCRIPT, "-n", "2", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert re.findall(r"^after .*$", run.stdout, re.MULTILINE) == re.findall(r"^after .*$", alone.stdout, re.MULTILINE)
    shown = re.findall(r"epoch (\d) +step (\d)/5 +loss ([0-9.]+)", run.stderr)
    assert {("1", "5"), ("2", "5")} <= {(epoch, step) for epoch, step, _ in shown}
    for epoch, step, loss in shown:
        assert loss == losses[5 * int(epoch) - 5 + int(step) - 1], run.stderr
    assert "10 steps" in run.stderr
