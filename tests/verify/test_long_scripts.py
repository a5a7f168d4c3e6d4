"""A script of many steps: some of its runs stop early, and a fault is found all the same, however late it begins.

The script has what made the noise floor useless in float32: rows without gradients, and an adaptive optimizer.
"""

import json
from pathlib import Path

import pytest
from support.verify_output import read_verdict
from support.warm_runs import rankless

pytestmark = pytest.mark.slow

STEPS, FIRST_STEPS = 72, 20
SCRIPT = """
import os, sys
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(50, 8), torch.nn.Flatten(), torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
ids, labels = torch.randint(50, (64, 4)), torch.randint(4, (64,))

@rankless.job(model=model, optimizer=optimizer)
def train(ids, labels):
    return F.cross_entropy(model(ids), labels)

for epoch in range(18):
    if os.environ["WORLD_SIZE"] != "1" and sys.argv[1] == str(epoch):
        optimizer.param_groups[0]["lr"] *= 1.001
    for batch in rankless.loader(torch.utils.data.TensorDataset(ids, labels), batch_size=16, shuffle=True, seed=0):
        train(*batch)
"""
"""The argument is the epoch, of 4 steps, from which on several workers have another learning rate."""


def verify(faulty_epoch: str, folder: Path) -> tuple[int, str, str, dict[str, object]]:
    """Return the exit code, both outputs, and the report."""
    (folder / "train.py").write_text(SCRIPT)
    options = ["-n", "2", "--devices", "cpu", "--seed", "1", "--json", "report.json"]
    job = rankless("verify", *options, "train.py", faulty_epoch, folder=folder)
    return job.returncode, job.stdout, job.stderr, json.loads((folder / "report.json").read_text())


@pytest.mark.exhaustive
def test_a_long_script_is_decided_in_its_own_precision_with_a_shorter_noise_run(tmp_path: Path) -> None:
    code, out, errors, report = verify("none", tmp_path)
    assert code == 0, out + errors
    assert (report["decided_in"], report["own_precision"]) == ("float32", None)
    assert (report["noise_steps"], report["steps"]) == (FIRST_STEPS, STEPS)
    assert f"noise floor: from the first {FIRST_STEPS} of {STEPS} steps" in out
    assert errors.count("perturbed") == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("epoch", "step", "own_steps"),
    [("16", 65, STEPS), pytest.param("2", 9, FIRST_STEPS, marks=pytest.mark.exhaustive)],
)
def test_a_fault_in_a_long_script_is_found_wherever_it_begins(
    epoch: str, step: int, own_steps: int, tmp_path: Path
) -> None:
    code, out, errors, report = verify(epoch, tmp_path)
    assert code == 1, out + errors
    assert read_verdict(out).startswith(f"NOT the same training: first at step {step}, ")
    assert (report["decided_in"], report["steps"], report["noise_steps"]) == ("float64", STEPS, STEPS)
    assert report["own_precision"]["steps"] == own_steps
