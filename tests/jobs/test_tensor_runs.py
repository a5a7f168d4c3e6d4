"""Runs on meshes with the axis `tensor`, with real processes."""

import json
import time
from pathlib import Path

import pytest
from mesh_runs import SCRIPT, resume
from support.warm_runs import rankless, run_script

MODEL = "torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 8))"


def write(folder: Path, options: str = "", end: str = "") -> None:
    (folder / "train.py").write_text(SCRIPT.format(model=MODEL, options=options, end=end))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_checkpoint_of_divided_features_continues_on_other_meshes_and_on_one_device(tmp_path):
    wanted = resume(tmp_path, ("--mesh", "data=2,tensor=2"), "save")
    others = (((), "none"), (("-n", "3"), "parameters"), (("--mesh", "tensor=3"), "none"))
    for options, zero in (*others, (("--mesh", "pipeline=2"), "none")):
        assert resume(tmp_path, options, "continue", zero) == pytest.approx(wanted, rel=1e-12, abs=1e-13)


@pytest.mark.slow
def test_divided_features_continue_a_checkpoint_of_one_device(tmp_path):
    wanted = resume(tmp_path, (), "save")
    assert resume(tmp_path, ("--mesh", "tensor=2"), "continue") == pytest.approx(wanted, rel=1e-12, abs=1e-13)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_saved_plan_has_the_divisions_and_runs(tmp_path):
    write(tmp_path)
    saved = rankless("plan", "--mesh", "tensor=2", "--steps", "5", "--save", "plan.json", "train.py", folder=tmp_path)
    assert saved.returncode == 0, saved.stdout + saved.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["axes"] == [{"name": "tensor", "role": "tensor", "size": 2}]
    states = plan["jobs"]["train"]["states"]
    found = {
        name: [(division["dim"], division["lengths"]) for division in state["value"]]
        for name, state in states.items()
        if state["value"]
    }
    assert found == {"model.0.weight": [(0, [6, 6])], "model.0.bias": [(0, [6, 6])], "model.2.weight": [(1, [6, 6])]}
    plain = rankless("run", "--seed", "1", "-q", "train.py", folder=tmp_path)
    planned = rankless("run", "-n", "2", "--seed", "1", "-q", "--plan", "plan.json", "train.py", folder=tmp_path)
    assert planned.stdout == plain.stdout, planned.stderr
    assert planned.stdout.startswith("loss ")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_plan_shows_what_is_divided_what_moves_and_what_a_worker_holds(tmp_path):
    write(tmp_path)
    options = ("--mesh", "tensor=2", "--steps", "5", "--json", "plan.json")
    found = rankless("plan", *options, "train.py", folder=tmp_path)
    assert found.returncode == 0, found.stderr
    programs = {job["program"]["job"]: job for job in json.loads((tmp_path / "plan.json").read_text())["jobs"]}
    moves = [(move["kind"], move["bytes"], move["axis"]) for move in programs["train"]["program"]["moves"]]
    assert moves in ([("all_reduce", rows * 8 * 8, "tensor")] for rows in (10, 8))
    divided, whole = (8 * 12 + 12 + 12 * 8) * 8, 8 * 8
    assert programs["train"]["memory"]["parameters"] == divided // 2 + whole
    assert programs["train"]["memory"]["gradients"] == divided // 2 + whole


PLANS = {
    "a pattern": ("tensor={'*.0.weight': Shard(0)}", ["0.bias", "0.weight", "2.weight"]),
    "a name without the model": ("tensor={'2.weight': Shard(-1)}", ["0.bias", "0.weight", "2.weight"]),
    "another dim": ("tensor={'model.2.*': Shard(0)}", ["2.bias", "2.weight"]),
    "nothing": ("tensor={'*': Replicate()}", []),
    "a follower that stays whole": ("tensor={'0.weight': Shard(0), '2.*': Replicate()}", ["0.bias", "0.weight"]),
}


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_script_says_what_is_divided(tmp_path, name):
    given, wanted = PLANS[name]
    end = "print(sorted(n for n, p in model.named_parameters() if hasattr(p, 'partition')))"
    write(tmp_path, options=f", plan=rankless.Plan({given})", end=end)
    plain = rankless("run", "--seed", "1", "-q", "train.py", folder=tmp_path)
    found = rankless("run", "--mesh", "tensor=2", "--seed", "1", "-q", "train.py", folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[0] == str(wanted)
    assert found.stdout.splitlines()[1:] == plain.stdout.splitlines()[1:]


REFUSED = {
    "no match": ("tensor={'*.up.weight': Shard(0)}", "found:    '*.up.weight', which matches none of 4"),
    "no dim": ("tensor={'0.weight': Shard(2)}", "found:    Shard(2)"),
    "too few rows": (
        "tensor={'0.weight': Shard(0)}",
        "expected: for model.0.weight of shape [1, 8] a dim with at least 2 rows",
    ),
    "no placement": ("tensor={'0.weight': 0}", "found:    0 for '0.weight'"),
    "another word": ("tensor='all'", "found:    tensor='all'"),
}


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(tmp_path, case):
    given, text = REFUSED[case]
    options = f", plan=rankless.Plan({given})"
    script = SCRIPT.format(model=MODEL, options=options, end="")
    if case == "too few rows":
        script = script.replace("Linear(8, 12)", "Linear(8, 1)").replace("Linear(12, 8)", "Linear(1, 8)")
    found = run_script(script, "--mesh", "data=2,tensor=2", folder=tmp_path)
    assert found.returncode != 0
    assert text in found.stdout + found.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_plan_for_other_lengths_is_refused(tmp_path):
    write(tmp_path)
    rankless("plan", "--mesh", "tensor=2", "--steps", "5", "--save", "plan.json", "train.py", folder=tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    for kind in ("value", "gradient", "optimizer_state"):
        plan["jobs"]["train"]["states"]["model.0.weight"][kind][0]["lengths"] = [6, 5]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = rankless("run", "-n", "2", "--plan", "plan.json", "train.py", folder=tmp_path)
    assert found.returncode == 2
    assert "found:    the lengths [6, 5] for 12 rows" in found.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_killed_worker_ends_the_run_and_is_named(tmp_path):
    write(tmp_path, end="if rankless.rank() == 1: import os; os.kill(os.getpid(), 9)\ntrain(*data.tensors)")
    started = time.monotonic()
    found = rankless("run", "--mesh", "tensor=2", "train.py", folder=tmp_path)
    assert found.returncode == 137
    assert "rank 1 was killed by signal 9" in found.stdout + found.stderr
    assert time.monotonic() - started < 60


BY_FUNCTION = """
def choose(model):
    assert isinstance(model, torch.nn.Sequential)
    return {result}
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_function_of_the_model_gives_the_plan(tmp_path):
    options = ", plan=choose"
    for result, wanted in (("rankless.Plan(tensor={'0.weight': Shard(0), '2.*': Replicate()})", True), ("4", False)):
        script = SCRIPT.format(model=MODEL, options=options, end="")
        function = BY_FUNCTION.format(result=result)
        (tmp_path / "train.py").write_text(script.replace("\noptimizer =", function + "\noptimizer =", 1))
        arguments = ("plan", "--mesh", "tensor=2", "--steps", "5", "--save", "plan.json", "train.py")
        found = rankless(*arguments, folder=tmp_path)
        assert (found.returncode == 0) is wanted, found.stdout + found.stderr
        if wanted:
            states = json.loads((tmp_path / "plan.json").read_text())["jobs"]["train"]["states"]
            assert [name for name, state in states.items() if state["value"]] == ["model.0.weight", "model.0.bias"]
        else:
            assert "a function that returns one" in found.stdout + found.stderr
            assert "plan=4" in found.stdout + found.stderr
