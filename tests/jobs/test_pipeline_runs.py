"""Runs on meshes with the axis `pipeline`, with real processes."""

import json
import re
import time
from pathlib import Path

import pytest
from mesh_runs import SCRIPT, resume
from support.warm_runs import rankless, run_script

MODEL = "torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)])"


def write(folder: Path, options: str = "", end: str = "") -> None:
    (folder / "train.py").write_text(SCRIPT.format(model=MODEL, options=options, end=end))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_checkpoint_of_a_pipeline_continues_on_other_meshes_and_on_one_device(tmp_path):
    wanted = resume(tmp_path, ("--mesh", "data=2,pipeline=2"), "save")
    for options, zero in (((), "none"), (("-n", "3"), "parameters"), (("--mesh", "pipeline=3"), "none")):
        assert resume(tmp_path, options, "continue", zero) == pytest.approx(wanted, rel=1e-12, abs=1e-13)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_checkpoint_of_stages_in_pieces_continues_on_other_meshes_and_on_one_device(tmp_path):
    wanted = resume(tmp_path, ("--mesh", "data=2,pipeline=2"), "save", "parameters")
    others = (((), "none"), (("-n", "3"), "parameters"), (("--mesh", "pipeline=3"), "none"))
    for options, zero in (*others, (("--mesh", "data=2,pipeline=2"), "gradients")):
        assert resume(tmp_path, options, "continue", zero) == pytest.approx(wanted, rel=1e-12, abs=1e-13)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_pipeline_continues_a_checkpoint_of_one_device(tmp_path):
    wanted = resume(tmp_path, (), "save")
    for mesh, zero in (("pipeline=2", "none"), ("data=2,pipeline=2", "parameters")):
        assert resume(tmp_path, ("--mesh", mesh), "continue", zero) == pytest.approx(wanted, rel=1e-12, abs=1e-13)


@pytest.mark.slow
def test_a_saved_plan_has_the_stages_and_runs(tmp_path):
    write(tmp_path, options=", plan=rankless.Plan(microbatches=3, stages=['model.1'])")
    saved = rankless("plan", "--mesh", "pipeline=2", "--steps", "5", "--save", "plan.json", "train.py", folder=tmp_path)
    assert saved.returncode == 0, saved.stdout + saved.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["axes"] == [{"name": "pipeline", "role": "pipeline", "size": 2}]
    pipeline = plan["jobs"]["train"]["pipeline"]
    assert (pipeline["schedule"], pipeline["microbatches"]) == ("1f1b", 3)
    assert pipeline["stages"] == {
        f"model.{place}.0.{kind}": int(place > 0) for place in range(4) for kind in ("weight", "bias")
    }
    assert plan["jobs"]["train"]["arguments"] == {"images": 0, "labels": 0}
    plain = rankless("run", "--seed", "1", "-q", "train.py", folder=tmp_path)
    planned = rankless("run", "-n", "2", "--seed", "1", "-q", "--plan", "plan.json", "train.py", folder=tmp_path)
    assert planned.stdout == plain.stdout
    assert planned.stdout.startswith("loss ")
    other = rankless("run", "--plan", "plan.json", "--mesh", "data=2", "-n", "2", "train.py", folder=tmp_path)
    assert "expected: the mesh of the plan: pipeline=2" in other.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_plan_shows_stages_what_they_send_and_what_a_worker_holds(tmp_path):
    write(tmp_path)
    options = ("--mesh", "pipeline=2", "--steps", "5", "--json", "plan.json")
    found = rankless("plan", *options, "train.py", folder=tmp_path)
    assert (
        "pipeline: 2 stages, schedule 1f1b, 4 microbatches; with equal stages workers wait 20% of the time"
        in found.stdout
    )
    assert "stage 1 on worker 1, from model.2: " in found.stdout
    programs = [job["program"] for job in json.loads((tmp_path / "plan.json").read_text())["jobs"]]
    train, predict = (next(item for item in programs if item["job"] == name) for name in ("train", "predict"))
    values = [(move["kind"], move["bytes"], move["backward"]) for move in train["moves"]]
    assert values == [("send", 10 * 8 * 8, False), ("send", 10 * 8 * 8, True)]
    assert [move["bytes"] for move in predict["moves"] if move["kind"] == "send"] == [38 * 8 * 8]
    memory = json.loads((tmp_path / "plan.json").read_text())["jobs"][0]["memory"]
    whole = 4 * (8 * 8 + 8) * 8
    assert memory["parameters"] == whole // 2
    assert memory["gradients"] == whole // 2
    assert whole <= memory["optimizer_state"] <= whole + 100  # two moments of half, and the numbers of steps


REFUSED = {
    "batch norm": (
        ", plan=None",
        "model[1][0] = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))",
        "found:    batch_norm of model.1.0.1 (BatchNorm1d), which needs the whole batch",
    ),
    "unknown stage": (", plan=rankless.Plan(stages=['model.7'])", "", "found:    'model.7', which it does not run"),
    "stage without parameters": (", plan=rankless.Plan(stages=['model.3.1'])", "", "found:    none for stage 1"),
    "too few stages": (", plan=rankless.Plan(stages=[])", "", "expected: stages= with 1 modules that job 'train' runs"),
    "another plan": (
        ", plan='1f1b'",
        "",
        "expected: plan= as a rankless.Plan, or a function that returns one\nfound:    plan='1f1b'",
    ),
    "class of plans": (", plan=rankless.Plan", "", "found:    plan=<class 'rankless."),
    "no schedule": (", plan=rankless.Plan(schedule='2f2b')", "", "found:    schedule='2f2b'"),
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_pipeline_is_refused_by_name(tmp_path, case):
    options, change, text = REFUSED[case]
    script = SCRIPT.format(model=MODEL, options=options, end="").replace("optimizer =", f"{change}\noptimizer =", 1)
    found = run_script(script, "--mesh", "pipeline=2", folder=tmp_path)
    assert found.returncode != 0
    # The agent indents the error of a rank that fails before rank 0, and ends rank 0.
    assert text in re.sub("^ +", "", found.stdout + found.stderr, flags=re.MULTILINE)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_job_without_a_plan_follows_the_stages_of_an_earlier_one(tmp_path):
    write(tmp_path, options=", plan=rankless.Plan(schedule='interleaved')")
    plain = rankless("run", "--seed", "1", "-q", "train.py", folder=tmp_path)
    found = rankless("run", "--mesh", "pipeline=2", "--seed", "1", "-q", "train.py", folder=tmp_path)
    assert found.stdout == plain.stdout, found.stderr
    assert found.stdout.startswith("loss ")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_plan_with_an_unknown_axis_is_refused(tmp_path):
    write(tmp_path)
    rankless("plan", "--mesh", "pipeline=2", "--save", "plan.json", "train.py", folder=tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["axes"][0]["role"] = "tensor"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = rankless("run", "-n", "2", "--plan", "plan.json", "train.py", folder=tmp_path)
    assert found.returncode == 2
    assert "found:    pipeline with the role tensor" in found.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_killed_stage_ends_the_run_and_is_named(tmp_path):
    write(tmp_path, end="if rankless.rank() == 1: import os; os.kill(os.getpid(), 9)\ntrain(*data.tensors)")
    started = time.monotonic()
    found = rankless("run", "--mesh", "pipeline=2", "train.py", folder=tmp_path)
    assert found.returncode == 137
    assert "rank 1 was killed by signal 9" in found.stdout + found.stderr
    assert time.monotonic() - started < 60
