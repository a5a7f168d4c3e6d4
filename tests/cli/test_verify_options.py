"""The options of `rankless verify`, and its report besides the verdict."""

import json
from pathlib import Path

import pytest
from support.verify_output import read_verdict
from support.warm_runs import rankless

pytestmark = pytest.mark.slow

SCRIPT = """
import pathlib, sys
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.idle = torch.nn.Linear(6, 8), torch.nn.Linear(8, 4), torch.nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(inputs))) * self.scale

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 36

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), index % 4

model, critic = Model(), torch.nn.Linear(5, 2)
weights = torch.tensor([1.0, 2.0, 1.0, 1.0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(inputs, labels):
    return {"loss": F.cross_entropy(model(inputs), labels, weight=weights.to(inputs.dtype)), "kind": "train"}

@rankless.job(model=model)
def predict(inputs):
    return model(inputs).argmax(dim=1)

@rankless.job(model=model)
def never(inputs):
    return model(inputs)

steps = 0
predict(torch.randn(4, 6))
try:
    for epoch in range(2):
        for batch in rankless.loader(Rows(), batch_size=9, shuffle=True, seed=0, num_workers=1):
            train(*batch)
            steps += 1
finally:
    pathlib.Path(f"ended-{rankless.world_size()}-{rankless.rank()}").write_text(str(steps))
sys.exit(3)
"""


def verify(folder: Path, *options: str, workers: int = 2):
    (folder / "train.py").write_text(SCRIPT)
    command = ["verify", "-n", str(workers), "--devices", "cpu", "--json", "report.json", *options, "train.py"]
    job = rankless(*command, folder=folder)
    file = folder / "report.json"
    return job, json.loads(file.read_text()) if file.exists() else None


@pytest.mark.exhaustive
def test_steps_ends_all_runs_and_the_report_lists_what_is_not_covered(tmp_path: Path) -> None:
    job, report = verify(tmp_path, "--steps", "3", workers=3)
    assert job.returncode == 0, job.stdout + job.stderr
    assert (report["steps"], report["stopped"]) == (3, True)
    assert "(stopped after 3 steps)" in read_verdict(job.stdout)
    # The third call did not return: what the script does after it was left out, its `finally` was not.
    ended = {path.name: path.read_text() for path in tmp_path.glob("ended-*")}
    assert ended == dict.fromkeys(["ended-1-0", "ended-3-0", "ended-3-1", "ended-3-2"], "2")
    expected = [
        "what the script does after step 3",
        "job predict (train.py:33): it was called only once, so its program was not used again",
        "job never (train.py:37): it was never called",
        "modules that belong to no job: Linear (12 parameters)",
        "results without numbers were compared as text only: ['kind'] of train",
        "parameters of a model that trains which never got a gradient: model.idle.weight, model.idle.bias",
        "buffers that never changed: model.scale",
        "tensors that a job reads from outside its models and arguments: train: float32[4]",
    ]
    assert report["not_covered"] == expected
    assert [line.removeprefix("  - ") for line in job.stdout.splitlines() if line.startswith("  - ")] == expected


def test_a_script_that_ends_on_its_own_is_not_reported_as_stopped(tmp_path: Path) -> None:
    job, report = verify(tmp_path, "--steps", "30")
    assert job.returncode == 3
    assert "failed with exit code 3" in job.stdout  # its own end, which it reached
    assert report["failure"]


@pytest.mark.exhaustive
def test_a_tolerance_decides_and_is_printed_with_the_noise_floor(tmp_path: Path) -> None:
    job, report = verify(tmp_path, "--steps", "2", "--tolerance", "1e-3")
    assert job.returncode == 0, job.stdout + job.stderr
    used = report["tolerance"]
    assert 0 < used["noise_floor"] < 1e-3
    assert used["largest_difference"] < 1e-3
    assert used["unmet"] is None
    assert "tolerance 0.001 of each tensor: the largest difference is " in job.stdout
    assert f"the noise floor {used['noise_floor']:.2g}" in job.stdout
    assert read_verdict(job.stdout).endswith(", tolerance 0.001")


@pytest.mark.exhaustive
def test_a_tolerance_below_the_noise_floor_is_reported_as_unreachable(tmp_path: Path) -> None:
    job, report = verify(tmp_path, "--steps", "4", "--tolerance", "1e-12")
    assert job.returncode == 3
    assert read_verdict(job.stdout).startswith("could not be decided: the script on one worker does not meet the")
    assert "not even the script on one worker, with its last bits perturbed, stays within it (" in job.stdout
    assert report["tolerance"]["unmet"] is not None
    assert report["decided_in"] == "float32"  # a bound of one's own is about the script's own precision
    assert "tolerance 1e-12, noise" in report["first_difference"]["expected"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--steps", "0"), "expected: at least 1 training step"),
        (("--tolerance", "2"), "expected: a tolerance between 0 and 1"),
        (("--against", "absent.py"), "no file absent.py"),
    ],
)
def test_an_invalid_option_is_rejected(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    job, _ = verify(tmp_path, *options)
    assert job.returncode == 2
    assert words in job.stderr
