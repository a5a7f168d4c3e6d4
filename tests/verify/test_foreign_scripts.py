"""Scripts of DDP, FSDP2, Horovod, Accelerate and Fabric: right ones are the same training; mistakes get their names."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.verify_output import read_verdict
from support.warm_runs import rankless

pytestmark = pytest.mark.slow

MISTAKES = [
    ("ddp", "batch norm", "batch norm per rank", 1),
    ("ddp", "whole batch", "whole batch on every rank", 1),
    ("ddp", "undivided", "undivided data", 3),
    ("fsdp2_script", "whole batch", "whole batch on every rank", 1),
    ("fsdp2_script", "undivided", "undivided data", 3),
    ("horovod_script", "learning rate", "learning rate", 1),
    ("horovod_script", "seeds", "different initial parameters", 1),
    ("accelerate_script", "whole batch", "whole batch on every rank", 1),
    ("accelerate_script", "padded", "padded last batch", 1),
    ("fabric_script", "whole batch", "whole batch on every rank", 1),
    ("fabric_script", "dropout", "dropout per rank", 1),
]
SAMPLE = [("horovod_script", "learning rate", "learning rate", 1)]


def verify(name: str, mistake: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    shutil.copy(Path(__file__).parent / "foreign_scripts" / f"{name}.py", folder / "train.py")
    options = ["-n", "2", "--devices", "cpu", "--seed", "1", "--json", "report.json"]
    job = rankless("verify", *options, "train.py", mistake, folder=folder)
    report = folder / "report.json"
    assert report.exists(), job.stdout + job.stderr
    return job, json.loads(report.read_text())


def require_cause(name: str, mistake: str, cause: str, code: int, folder: Path) -> None:
    job, report = verify(name, mistake, folder)
    assert job.returncode == code, job.stdout + job.stderr
    assert report["cause"]["name"] == cause
    assert report["cause"]["text"] in job.stdout
    assert f"next: {report['cause']['fix']}" in job.stdout
    assert (f"cause: {cause}: " in job.stdout) == (code == 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "mistake", "cause", "code"), SAMPLE)
def test_a_mistake_is_named(name: str, mistake: str, cause: str, code: int, tmp_path: Path) -> None:
    require_cause(name, mistake, cause, code, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "mistake", "cause", "code"), MISTAKES)
def test_every_mistake_is_named(name: str, mistake: str, cause: str, code: int, tmp_path: Path) -> None:
    require_cause(name, mistake, cause, code, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fsdp2_script", "ddp", "horovod_script", "accelerate_script", "fabric_script"])
def test_a_right_script_is_the_same_training(name: str, tmp_path: Path) -> None:
    job, report = verify(name, "right", tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    assert read_verdict(job.stdout).startswith(f"same training: {report['steps']} steps on 1 and on 2 workers")
    assert report["steps"] >= 6
    assert report["cause"] is None


def test_a_script_that_does_not_train_is_rejected_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nprint(torch.ones(2).sum())")
    job = rankless("verify", "-n", "2", "--devices", "cpu", "train.py", folder=tmp_path)
    assert job.returncode == 2
    assert "expected: a script that trains" in job.stderr
    assert "fix:      put @rankless.job" in job.stderr
