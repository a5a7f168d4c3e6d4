"""`rankless verify`, with real runs of small scripts."""

import json
import re
from pathlib import Path

import pytest
from support.verify_output import read_verdict
from support.warm_runs import rankless

pytestmark = pytest.mark.slow

SCRIPT = """
import os
import torch, torch.nn.functional as F
import rankless

FAULT = {fault!r} if os.environ["WORLD_SIZE"] != "1" else ""

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(10, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02 if FAULT == "rate" else 0.01)
images, labels = torch.randn(67, 10), torch.randint(0, 4, (67,))

@rankless.job(model=model, optimizer=optimizer)
def train(images, labels):
    return {{"loss": F.cross_entropy(model(images), labels)}}

@rankless.job(model=model)
def correct(images, labels):
    return (model(images).argmax(dim=1) == labels).sum()

steps = 0
for epoch in range(2):
    model.train()
    for batch in rankless.loader(torch.utils.data.TensorDataset(images, labels), batch_size=20, shuffle=True, seed=0):
        steps += 1
        if FAULT == "drift" and steps == 3 and os.environ["RANK"] == "1":
            model[0].weight.data[0, 0] += 1e-1
        print("loss", train(*batch)["loss"].item())
    model.eval()
    print("correct", correct(images, labels).item())
if FAULT == "longer":
    model.train()
    train(images[:20], labels[:20])
"""

FLIPS = """
import os
import torch, torch.nn.functional as F
import rankless

FAULT = {fault!r} if os.environ["WORLD_SIZE"] != "1" else ""

torch.manual_seed(0)
model = torch.nn.Linear(10, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(80, 10), torch.randint(0, 4, (80,))
weights = torch.ones(4, dtype=torch.float32)

@rankless.job(model=model, optimizer=optimizer)
def train(inputs, labels):
    loss = F.cross_entropy(model(inputs), labels, weight={weight})
    last_bit = (inputs * 5).square().sum().mul(2**12).floor() % 2
    return {{"loss": loss, "last bit": last_bit}}

for inputs, labels in rankless.loader(torch.utils.data.TensorDataset(inputs, labels), batch_size=10):
    train(inputs * (2 if FAULT else 1), labels)
"""
"""In float32 the order of summation changes the last bit of a sum; in float64 that bit is 30 places lower."""


def verify(folder: Path, script: str, *options: str, workers: int = 2):
    (folder / "train.py").write_text(script)
    command = ["verify", "-n", str(workers), "--devices", "cpu", "--json", "report.json", *options, "train.py"]
    job = rankless(*command, folder=folder)
    file = folder / "report.json"
    return job, json.loads(file.read_text()) if file.exists() else None


@pytest.mark.exhaustive
def test_a_training_is_the_same_on_three_workers(tmp_path: Path) -> None:
    job, report = verify(tmp_path, SCRIPT.format(fault=""), "--keep", "recordings", workers=3)
    assert job.returncode == 0, job.stdout + job.stderr
    assert read_verdict(job.stdout).startswith("same training: 8 steps and 10 job calls on 1 and on 3 workers")
    assert "loss 1." not in job.stdout + job.stderr
    assert "gradients, each step" in job.stdout
    assert report["same"] is True
    assert report["steps"] == 8
    assert len(report["losses_one"]) == len(report["losses_many"]) == 8
    assert report["losses_one"] == pytest.approx(report["losses_many"], rel=1e-4)
    assert report["largest_loss_difference"] < 1e-4
    assert report["first_difference"] is None
    # A bias before batch norm moves by rounding alone. It depends on the machine whether that calls for float64.
    assert (report["decided_in"] == "float32") == (report["own_precision"] is None)
    assert {path.name for path in (tmp_path / "recordings").iterdir()} >= {"many", "noise0", "one"}
    assert any("loss 1." in log.read_text() for log in (tmp_path / "log").glob("*/rank0.log"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "step", "tensor", "decided_in"),
    [
        pytest.param("rate", 1, "model.", "float64", marks=pytest.mark.exhaustive),
        ("drift", 3, "result ['loss'] of train", "float32"),  # ranks that disagree are no matter of rounding
        ("longer", 9, "the calls", "float64"),  # a script may decide by numbers that rounding changes
    ],
)
def test_an_injected_fault_is_found_and_its_step_named(
    tmp_path: Path, fault: str, step: int, tensor: str, decided_in: str
) -> None:
    job, report = verify(tmp_path, SCRIPT.format(fault=fault))
    assert job.returncode == 1, job.stdout + job.stderr
    verdict = read_verdict(job.stdout)
    assert verdict.startswith(f"NOT the same training: first at step {step}, ")
    assert report["same"] is False
    assert report["first_difference"]["step"] == step
    assert tensor in report["first_difference"]["tensor"]
    assert report["decided_in"] == decided_in
    assert (report["own_precision"] is not None) == (decided_in == "float64")


def test_float64_decides_if_rounding_flips_a_result_in_float32(tmp_path: Path) -> None:
    job, report = verify(tmp_path, FLIPS.format(fault="", weight=None), "-v")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("gradients, each step") == 2
    verdict = read_verdict(job.stdout)
    assert verdict.startswith("same training: 8 steps")
    assert verdict.endswith("; decided in float64")
    own = report["own_precision"]
    step = own["first_difference"]["step"]
    assert f"in float32 the runs part at step {step}, result ['last bit'] of train; repeating" in job.stderr
    assert (report["verdict"], report["same"], report["exit_code"]) == ("same", True, 0)
    assert (report["decided_in"], own["decided_in"]) == ("float64", "float32")
    assert report["largest_loss_difference"] < 1e-14 < own["largest_loss_difference"] < 1e-6


@pytest.mark.exhaustive
def test_float64_does_not_hide_a_fault_besides_rounding(tmp_path: Path) -> None:
    job, report = verify(tmp_path, FLIPS.format(fault="doubled", weight=None))
    assert job.returncode == 1
    verdict = read_verdict(job.stdout)
    assert verdict.startswith("NOT the same training: first at step 1, result ['loss'] of train")
    assert verdict.endswith("; decided in float64")
    assert "\nnext: look at this line" in job.stdout
    assert report["decided_in"] == "float64"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("fault", "code"), [("", 3), ("doubled", 1)])
def test_if_float64_fails_only_a_gross_difference_is_decided(tmp_path: Path, fault: str, code: int) -> None:
    script = FLIPS.format(fault=fault, weight=None).replace(
        "torch.manual_seed(0)", "if torch.get_default_dtype() == torch.float64: raise SystemExit(1)"
    )
    job, report = verify(tmp_path, script, "--seed", "1")
    assert job.returncode == code
    verdict = read_verdict(job.stdout)
    failure = "the run on 1 worker, float64 failed with exit code 1"
    expected = r"could not be decided: in float32 the runs part at step \d, result \['last bit'\] of train, and "
    assert re.match("NOT the same training: first at step 1" if fault else expected, verdict)
    assert verdict.endswith(failure)
    assert (report["decided_in"], report["own_precision"]) == ("float32", None)
    assert report["float64_failure"] == failure


@pytest.mark.exhaustive
def test_dtype_float64_compares_only_in_float64(tmp_path: Path) -> None:
    job, report = verify(tmp_path, FLIPS.format(fault="", weight=None), "--dtype", "float64")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("gradients, each step") == 1
    assert (report["decided_in"], report["own_precision"]) == ("float64", None)
    assert report["largest_parameter_difference"] < 1e-14


def test_a_script_without_a_job_is_rejected_with_a_fix(tmp_path: Path) -> None:
    job, _ = verify(tmp_path, "print('nothing to compare')")
    assert job.returncode == 2
    assert "expected: a script that trains: it calls at least one job, or steps an optimizer" in job.stderr
    assert "fix:      put @rankless.job" in job.stderr


def test_a_run_that_fails_decides_nothing(tmp_path: Path) -> None:
    script = "import os, sys\nif os.environ['WORLD_SIZE'] == '2': sys.exit(3)\n" + SCRIPT.format(fault="")
    job, report = verify(tmp_path, script)
    assert job.returncode == 3
    assert read_verdict(job.stdout) == "could not be decided: the run on 2 workers failed with exit code 3"
    assert "next: correct the error that is printed above" in job.stdout
    assert (report["verdict"], report["same"]) == ("undecided", False)
    assert "failed with exit code 3" in report["failure"]


def test_a_run_that_cannot_start_reports_the_reason(tmp_path: Path) -> None:
    job = rankless("verify", "-n", "2", "absent.py", folder=tmp_path)
    assert job.returncode == 2
    assert "no file absent.py" in job.stderr
