"""A training run that is killed and started again continues bit for bit: real runs, on 1, 2 and 3 workers."""

import subprocess
from pathlib import Path

import pytest
from support.warm_runs import rankless

SCRIPT = """
import os, random, signal, sys
import numpy, torch
import torch.nn.functional as F
import rankless

torch.set_default_dtype(torch.float64)
stop, folder = int(sys.argv[1]), sys.argv[2]
rows = torch.randn(70, 6, generator=torch.Generator().manual_seed(7))
data = torch.utils.data.TensorDataset(rows, (rows.sum(dim=1) > 0).long())

torch.manual_seed(1)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 20, bias=False), torch.nn.BatchNorm1d(20), torch.nn.ReLU(),
    torch.nn.Dropout(0.3), torch.nn.Linear(20, 2)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
seed = 5 if sys.argv[4] == "seeded" else None
loader = rankless.loader(data, batch_size=16, shuffle=True, seed=seed)

@rankless.job(model=model, optimizer=optimizer)
def train(rows, labels):
    return F.cross_entropy(model(rows), labels)

checkpoints = rankless.checkpoints(folder, keep_last=2, background=True, layout=sys.argv[3])
parts = dict(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
resumed = checkpoints.load(**parts)
step = resumed.step if resumed else 0
while step < 10:
    for rows, labels in loader:
        noise = random.random() + numpy.random.rand() + torch.rand(()).item()
        loss = train(rows * (1 + 0.01 * noise), labels)
        scheduler.step()
        step += 1
        print("step", step, loss.item().hex(), optimizer.param_groups[0]["lr"], flush=True)
        if step <= stop:
            checkpoints.save(step, extra={"of": rankless.world_size()}, **parts)
        if step == 10:
            break
        if step == stop + 1:
            checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)
for name, value in model.state_dict().items():
    print(name, value.double().sum().item().hex(), value.double().square().sum().item().hex())
"""


def run(folder: Path, workers: int, stop: int, *how: str, folder_name: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    options = ("-n", str(workers), "--devices", "cpu", "--seed", "3", "--no-progress")
    return rankless("run", *options, "train.py", str(stop), folder_name, *how, folder=folder)


def numbers(lines: list[str]) -> list[float]:
    return [float.fromhex(word) for line in lines for word in line.split() if word.startswith(("0x", "-0x"))]


CASES = [
    (1, "whole", "seeded", []),
    (2, "sharded", "unseeded", [1, 3]),
    pytest.param(3, "whole", "unseeded", [], marks=pytest.mark.exhaustive),
]


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("workers", "layout", "seeding", "others"), CASES)
def test_a_run_killed_in_an_epoch_continues_bit_for_bit(
    tmp_path: Path, workers: int, layout: str, seeding: str, others: list[int]
) -> None:
    uninterrupted = run(tmp_path, workers, -1, layout, seeding, folder_name="none")
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    whole = uninterrupted.stdout.splitlines()
    assert len(whole) == 10 + 8
    killed = run(tmp_path, workers, 6, layout, seeding, folder_name="row")
    assert killed.returncode != 0
    assert killed.stdout.splitlines()[:6] == whole[:6]
    resumed = run(tmp_path, workers, -1, layout, seeding, folder_name="row")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.splitlines() == whole[6:]
    # The same checkpoint on another number of workers gives the same training, except for the rounding of sums.
    for other in others:
        moved = run(tmp_path, other, -1, layout, seeding, folder_name="row")
        assert moved.returncode == 0, moved.stderr
        assert numbers(moved.stdout.splitlines()) == pytest.approx(numbers(whole[6:]), rel=1e-9, abs=1e-12)
