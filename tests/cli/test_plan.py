"""`rankless plan`, with real runs of small scripts."""

import os
from pathlib import Path

import pytest
from support.json_schema import check_result
from support.warm_runs import rankless

from rankless.records.job_programs import (
    JobProgram,
    KnownJob,
    ProgramCommunication,
    ProgramInputRecord,
    ReplicatedOperator,
)
from rankless.terminal.program_table import format_decimal_bytes, make_plan_report, render_plan

SCRIPT = """
import pathlib
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)

    def forward(self, values):
        return torch.relu(self.norm(self.linear(values)))

model = torch.nn.Sequential(*[Block() for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(images, labels):
    return F.cross_entropy(model(images), labels) + torch.linalg.matrix_exp(images[:, :, None] * images[:, None]).mean()

@rankless.job(model=model)
def correct(images, labels):
    return (model(images).argmax(dim=1) == labels).sum()

images, labels = torch.randn(40, 8), torch.randint(0, 8, (40,))
try:
    for step in range(50):
        print("step", step)
        train(images[:10], labels[:10])
        if step == 2:
            correct(images, labels)
finally:
    pathlib.Path(f"ended{rankless.rank()}").write_text(str(step))
print("not reached")
"""


@pytest.mark.slow
def test_the_first_step_gives_a_table_and_json(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["-n", "3", "--devices", "cpu", "--json", "plan.json", "--seed", "7"]
    job = rankless("plan", *options, "train.py", "--epochs", "1", folder=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    assert (tmp_path / "ended0").read_text() == (tmp_path / "ended2").read_text() == "0"
    assert "not reached" not in job.stdout
    assert max(map(len, job.stdout.splitlines())) <= 100
    report = check_result((tmp_path / "plan.json").read_text(), "plan")
    assert (report["script"], report["arguments"], report["seed"]) == ("train.py", ["--epochs", "1"], 7)
    (planned,) = report["jobs"]
    program = planned["program"]
    assert (program["job"], program["workers"], report["steps"]) == ("train", 3, 1)
    assert [os.path.basename(item["line"]) for item in program["gathered"]] == ["train.py:20"]
    assert "matrix_exp" in program["gathered"][0]["operator"]
    assert planned["moved_bytes"] == sum(move["bytes"] for move in program["moves"])
    reasons = [move["reason"] for move in program["moves"]]
    assert reasons.count("statistics of the whole batch") == 4
    assert " 4 x   all_gather" in job.stdout
    assert "job correct (train.py:22) was not called within 1 training step" in job.stdout


@pytest.mark.slow
def test_more_steps_reach_more_jobs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["-n", "2", "--devices", "cpu", "--steps", "4", "--show", "--json", "-"]
    job = rankless("plan", *options, "train.py", folder=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    report = check_result(job.stdout, "plan")
    assert [planned["program"]["job"] for planned in report["jobs"]] == ["train", "correct"]
    assert report["not_reached"] == []
    assert report["seed"] is not None
    assert "rankless plan: train.py, 2 workers, 4 training steps" in job.stderr
    assert "step 3" in job.stderr


def test_invalid_options_are_rejected_with_a_fix(tmp_path: Path) -> None:
    job = rankless("plan", "-n", "1", "-c", "pass", folder=tmp_path)
    assert job.returncode == 2
    assert "expected: at least 2 workers" in job.stderr
    job = rankless("plan", "-n", "2", "--steps", "0", "-c", "pass", folder=tmp_path)
    assert job.returncode == 2
    assert "expected: at least 1 training step" in job.stderr


@pytest.mark.slow
def test_a_script_without_jobs_and_a_failing_script_differ(tmp_path: Path) -> None:
    job = rankless("plan", "--devices", "cpu", "-c", "import rankless; rankless.rank()", folder=tmp_path)
    assert job.returncode == 2
    assert "expected: a script that defines at least one job" in job.stderr
    job = rankless("plan", "--devices", "cpu", "-c", "import sys; sys.exit(3)", folder=tmp_path)
    assert job.returncode == 1
    assert "the run on 2 workers failed with exit code 3" in job.stdout


def test_the_table_groups_moves_and_fits_100_columns() -> None:
    def move(kind: str, value: str, size: int, *, overlapped: bool = False) -> ProgramCommunication:
        return ProgramCommunication(
            kind=kind,
            value=value,
            bytes=size,
            sent_bytes=size,
            line=f"/somewhere/{'long' * 12}.py:7",
            reason="the reason " * 9,
            overlapped=overlapped,
        )

    weight = ProgramInputRecord(
        kind="parameter", name="w", shape=(2,), dtype="float32", bytes=8, placement="whole on every worker"
    )
    program = JobProgram(
        job="train",
        line="/somewhere/train.py:3",
        trains=True,
        workers=2,
        operators=9,
        inputs=(weight, weight),
        moves=(
            *[move("all_gather", f"v{layer}", 1_500) for layer in range(12)],
            move("all_reduce", "w", 8, overlapped=True),
        ),
        gathered=(ReplicatedOperator(operator="aten.odd.default", line="/somewhere/train.py:5"),),
    )
    known = KnownJob(job="predict", line="/somewhere/train.py:9", called=False)
    report = make_plan_report([program, known], workers=2, steps=1)
    lines = render_plan(report).splitlines()
    assert max(map(len, lines)) == 100
    assert "train job train (train.py:3): 9 operators" in lines
    assert "  2 parameters, 16 B: whole on every worker" in lines
    assert sum("all_gather" in line for line in lines) == 1
    assert next(line for line in lines if "all_gather" in line).startswith("   12 x   all_gather      1.5 kB  1.5 kB")
    assert next(line for line in lines if "all_reduce" in line).startswith("        ~ all_reduce")
    assert "  total: 13 moves, 18.0 kB of values; each worker sends 18.0 kB (ring collectives)" in lines
    assert lines[-1].startswith("job predict (train.py:9) was not called within 1 training step")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_960, "100 kB"), (26_214_400, "26.2 MB")]
)
def test_bytes_use_the_shortest_unit(size: int, text: str) -> None:
    assert format_decimal_bytes(size) == text
