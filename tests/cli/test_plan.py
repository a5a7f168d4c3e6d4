"""`rankless plan`, with real runs of small scripts."""

import os
from pathlib import Path

import msgspec
import pytest
from support.json_schema import check_result
from support.warm_runs import rankless

from rankless.records.job_programs import (
    DefinedJob,
    JobMemory,
    JobProgram,
    ProgramCommunication,
    ProgramInputRecord,
    ReplicatedOperator,
)
from rankless.records.number_formatting import format_decimal_bytes
from rankless.records.program_by_module import group_by_module
from rankless.terminal.plan_table import make_plan_report, render_modules, render_plan

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
    return F.cross_entropy(model(images), labels) + torch.pdist(images).mean()

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
    assert [os.path.basename(item["line"]) for item in program["without_rule"]] == ["train.py:20"]
    assert "pdist" in program["without_rule"][0]["operator"]
    (gathered,) = (move for move in program["moves"] if move["gathered"])
    assert (gathered["purpose"], gathered["reason"], gathered["module"]) == ("input", "input of pdist_forward", "")
    assert planned["gathered_bytes"] == gathered["bytes"] == 10 * 8 * 4
    assert 0 < program["whole_operators"] < program["operators"]
    assert planned["moved_bytes"] == sum(move["bytes"] for move in program["moves"])
    assert {move["axis"] for move in program["moves"]} == {"data"}
    statistics = [move for move in program["moves"] if move["reason"] == "statistics of the whole batch"]
    assert [move["module"] for move in statistics] == [f"model.{layer}.norm" for layer in range(4)]
    assert {(move["module_type"], move["backward"]) for move in statistics} == {("BatchNorm1d", False)}
    shown = " ".join(job.stdout.split())
    assert "4 x all_gather 192 B 128 B train.py:13: statistics of the whole batch in model.[0-3].norm" in shown
    assert "gathered on every worker: 1 value, 320 B; every worker computes" in shown
    assert "gathered on every worker: none" not in shown
    memory = planned["memory"]
    parameters = 4 * (8 * 8 + 8 + 8 + 8) * 4
    assert (memory["parameters"], memory["gradients"], memory["optimizer_state"]) == (parameters, parameters, 0)
    assert memory["buffers"] == 4 * ((8 + 8) * 4 + 8)
    assert 10 * 8 * 4 < memory["activations"] < 100 * 10 * 8 * 4
    assert "memory per worker: parameters 1.4 kB, buffers 288 B, gradients 1.4 kB, activations" in shown
    assert "job correct (train.py:22) was not called within 1 training step" in job.stdout


TABLES = """
import torch
import rankless

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = rankless.parameter_server.Embedding(4)
        self.top = rankless.parameter_server.mark_dense(torch.nn.Linear(4, 1))

    def forward(self, ids):
        return self.top(self.rows(ids).sum(1) + self.rows(ids[:, 0])).square().mean()

model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(ids):
    return model(ids)

train(torch.arange(18).reshape(6, 3))
"""
READ = "train.py:12: 1 lookup of at most 18 ids, 288 B, in model.rows (Embedding)"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "head"),
    [
        (
            ("--servers", "2", "--workers", "3"),
            "rows of tables, on 2 servers: in a call workers read the rows of different ids, and send their gradients",
        ),
        pytest.param(
            ("-n", "2"),
            "rows of tables, all in every worker: in a call each sends the gradients of its different ids to all",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ("--servers", "1", "--workers", "2", "--heter-workers", "1"),
            "rows of tables, on 1 server: in a call workers",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_plan_has_the_rows_of_tables_that_move(tmp_path: Path, options, head) -> None:
    (tmp_path / "train.py").write_text(TABLES)
    job = rankless("plan", *options, "--json", "plan.json", "train.py", folder=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    shown = " ".join(job.stdout.split())
    assert head in shown
    report = check_result((tmp_path / "plan.json").read_text(), "plan")
    assert report["servers"] == (int(options[1]) if options[0] == "--servers" else 0)
    lookups = report["jobs"][0]["program"]["lookups"]
    assert sorted((each["ids"], each["row_bytes"], each["module"]) for each in lookups) == [
        (6, 16, "model.rows"),
        (18, 16, "model.rows"),
    ]
    assert READ in shown


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--servers", "1", "--server-mode", "async"), "plan the script in the mode sync"),
        (("--servers", "198.51.100.7:6170", "--workers", "2"), "addresses of other hosts"),
        (("--servers", "1", "--workers", "198.51.100.7,198.51.100.8"), "addresses of other hosts"),
        (("--servers", "1", "--workers", "1"), "at least 2 workers"),
        (("--servers", "1", "-n", "3", "--workers", "2"), "one number of workers"),
    ],
)
def test_servers_that_a_plan_cannot_have_are_refused(tmp_path: Path, options, text) -> None:
    (tmp_path / "train.py").write_text(TABLES)
    job = rankless("plan", *options, "train.py", folder=tmp_path)
    assert job.returncode == 2, job.stdout + job.stderr
    assert text in job.stdout + job.stderr


@pytest.mark.exhaustive
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


REASON = "a reason of many words, each of which the reader needs, whatever the width of the terminal is"


def make_table_program() -> JobProgram:
    def move(kind: str, value: str, layer: int, *, overlapped: bool = False) -> ProgramCommunication:
        return ProgramCommunication(
            kind=kind,
            purpose="gradient" if overlapped else "input",
            value=value,
            bytes=1_500,
            sent_bytes=1_500,
            line=f"/somewhere/{'long' * 12}.py:7",
            module="" if overlapped else f"model.layers.{layer}.attention",
            module_type="" if overlapped else "MultiheadAttention",
            reason="2 gradients" if overlapped else REASON,
            gathered=not overlapped,
            in_full=not overlapped,
            overlapped=overlapped,
        )

    weight = ProgramInputRecord(
        kind="parameter", name="w", shape=(2,), dtype="float32", bytes=8, placement="whole on every worker"
    )
    return JobProgram(
        job="train",
        line="/somewhere/train.py:3",
        trains=True,
        workers=2,
        calls_per_step=4,
        operators=9,
        whole_operators=5,
        inputs=(weight, weight),
        moves=(
            *[move("all_gather", f"v{layer}", layer) for layer in range(12)],
            move("all_reduce", "model.layers.0.weight, model.layers.0.bias", 0, overlapped=True),
        ),
        without_rule=(
            ReplicatedOperator(
                operator="aten.odd.default",
                name="odd",
                line="/somewhere/train.py:5",
                module="model.2",
                module_type="Odd",
            ),
        ),
    )


@pytest.mark.parametrize("width", [40, 41, 57, 67, 68, 80, 100, 120, 200])
def test_the_table_fits_any_width_and_cuts_nothing_off(width: int) -> None:
    known = DefinedJob(job="predict", line="/somewhere/train.py:9", called=False)
    mirrored = DefinedJob(job="twin", line="/somewhere/train.py:11", called=True)
    memory = JobMemory(parameters=1500, buffers=0, gradients=1500, optimizer_state=3000, activations=4500)
    compiled = DefinedJob(job="train", line="/somewhere/train.py:3", called=True, memory=memory)
    report = make_plan_report([make_table_program(), known, mirrored, compiled], workers=2, steps=1)
    lines = render_plan(report, width).splitlines()
    assert max(map(len, lines)) <= width
    words = "".join("".join(lines).split())
    for text in (
        REASON,
        "long" * 12,
        "in model.layers.[0-11].attention (MultiheadAttention)",
        "2 gradients: model.layers.0.weight, model.layers.0.bias",
        "gathered on every worker: 12 values, 18.0 kB; every worker computes 5 of 9 operators in full",
        f"{REASON} of model.layers.[0-11].attention (MultiheadAttention) gathers 72.0 kB per step: its rule",
        "train.py:5: odd of model.2 (Odd) takes gathered values: it has no sharding rule",
        "computed in full: 1: aten.odd.default (train.py:5, model.2)",
        "total: 13 moves, 19.5 kB of values; each worker sends 19.5 kB (ring collectives)",
        "data moved per call (4 calls make a step), in order of start",
        "memory per worker: parameters 1.5 kB, gradients 1.5 kB, optimizer state 3.0 kB, activations 4.5 kB",
        "job predict (train.py:9) was not called within 1 training step; increase --steps",
        "job twin (train.py:11) is not compiled, so it has no plan: view='mirrored' or capture=False",
    ):
        assert "".join(text.split()) in words, text
    assert "…" not in words
    assert sum("all_gather" in line for line in lines) == 1
    assert next(line for line in lines if "all_gather" in line).startswith("  12 x   all_gather  1.5 kB  1.5 kB")
    assert next(line for line in lines if "all_reduce" in line).startswith("       ~ all_reduce")


def test_the_table_is_wrapped_to_the_least_width_on_a_narrower_terminal() -> None:
    report = make_plan_report([make_table_program()], workers=2, steps=1)
    assert render_plan(report, 10) == render_plan(report, 40)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_960, "100 kB"), (26_214_400, "26.2 MB")]
)
def test_bytes_use_the_shortest_unit(size: int, text: str) -> None:
    assert format_decimal_bytes(size) == text


def test_modules_have_their_parameters_and_what_is_sent_for_them() -> None:
    def move(value: str, sent: int, *, module: str = "", axis: str = "data") -> ProgramCommunication:
        return ProgramCommunication(
            kind="all_reduce",
            purpose="input" if module else "gradient",
            value=value,
            bytes=sent,
            sent_bytes=sent,
            line="a.py:1",
            module=module,
            reason="a reason",
            axis=axis,
            overlapped=False,
        )

    sizes = {"model.words.weight": 600, "model.layers.0.a.weight": 200, "model.layers.1.a.weight": 200}
    program = msgspec.structs.replace(
        make_table_program(),
        inputs=tuple(
            ProgramInputRecord(kind="parameter", name=name, shape=(1,), dtype="float32", bytes=size, placement="whole")
            for name, size in sizes.items()
        ),
        moves=(
            move(", ".join(sizes), 1000),
            move("float32[8] of matmul", 70, module="model.layers.1.a", axis="tensor"),
            move("float32[] of mean", 4),
        ),
    )
    assert list(render_modules(group_by_module(program))) == [
        "parameters  sent along data  sent along tensor  module",
        "     600 B            600 B                  -  model.words",
        "     400 B            400 B               70 B  model.layers.[0-1]",
        "         -              4 B                  -  outside of modules",
    ]
