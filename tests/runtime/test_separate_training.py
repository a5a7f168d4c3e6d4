"""A script whose workers each train a model of their own is warned once; one that connects them is not."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import DEADLINE_SECONDS
from support.warm_runs import run_script

PLAIN = """
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).mean().backward()
    optimizer.step()
"""
DATA_PARALLEL = PLAIN.replace(
    "optimizer =",
    "torch.distributed.init_process_group('gloo')\nddp = torch.nn.parallel.DistributedDataParallel(model)\noptimizer =",
).replace("    model(", "    ddp(")
JOB = """
import torch, rankless
model = torch.nn.Linear(3, 1)
@rankless.job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
def train(x):
    return model(x).mean()
for _ in range(5):
    train(torch.ones(4, 3))
"""
ACCELERATE = """
import torch
from accelerate import Accelerator
accelerator = Accelerator({options})
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(5):
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(4, 3)).mean())
    optimizer.step()
"""
WARNING = "each of the 2 workers trains a model of its own"
NOT_CONNECTED = "the script has no job and no process group"


OBSERVED = """
from rankless.runtime.hooks.script_mistakes import warn_on_separate_training

warnings = []
warn_on_separate_training(warnings.append, world_size=2)

def train(steps):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
"""


def run_observed(folder: Path, script: str) -> None:
    """Run a script in a process of its own: other tests connect this one, as by Horovod or a process group."""
    (folder / "script.py").write_text(f"import torch\nimport torch.distributed as dist\n{OBSERVED}\n{script}")
    command = [sys.executable, "script.py"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.exhaustive
def test_one_step_is_no_training_and_the_second_warns_once(tmp_path: Path):
    run_observed(
        tmp_path,
        f"""
train(steps=1)
assert warnings == []
train(steps=4)
(warning,) = warnings
assert {f"{WARNING}: {NOT_CONNECTED}"!r} in warning, warning
assert "script.py:15: " in warning, warning
train(steps=9)
assert len(warnings) == 1
""",
    )


def test_a_process_group_is_not_warned_about(tmp_path: Path):
    run_observed(
        tmp_path,
        """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
train(steps=4)
assert warnings == []
dist.destroy_process_group()
""",
    )


@pytest.mark.slow
def test_a_plain_script_under_two_workers_is_warned_once_with_its_line(tmp_path: Path):
    job = run_script(PLAIN, "-n", "2", "--devices", "cpu", "--separate", folder=tmp_path)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count(WARNING) == 1
    assert f"script.py:8: {WARNING}" in job.stderr
    assert "For one training use `rankless run --logical`" in job.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("script", "workers", "warned"),
    [
        (PLAIN, "1", False),
        (DATA_PARALLEL, "2", False),
        (JOB, "2", False),
        (ACCELERATE.format(options=""), "2", True),
        (ACCELERATE.format(options="cpu=True"), "2", False),
    ],
    ids=["one worker", "data parallel", "job", "accelerate", "accelerate on CPUs"],
)
def test_scripts_that_connect_their_workers_are_left_alone(script: str, workers: str, warned: bool, tmp_path: Path):
    job = run_script(script, "-n", workers, "--devices", "cpu", folder=tmp_path)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count(WARNING) == int(warned), job.stderr
    assert ("Accelerator(cpu=True)" in job.stderr) == warned
