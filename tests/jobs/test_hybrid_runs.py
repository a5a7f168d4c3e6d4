"""Runs on meshes that combine axes: checkpoints, saved plans, what is shown, and what is refused."""

import json
from pathlib import Path

import pytest
from mesh_runs import SCRIPT, resume
from support.warm_runs import rankless

MODEL = "torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8), torch.nn.Linear(8, 8))"


def write(folder: Path, options: str = "", end: str = "") -> None:
    (folder / "train.py").write_text(SCRIPT.format(model=MODEL, options=options, end=end))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_checkpoint_of_three_axes_continues_with_zero_and_on_one_device(tmp_path):
    wanted = resume(tmp_path, ("--mesh", "data=2,tensor=2,pipeline=2"), "save")
    others = (((), "none"), (("-n", "3"), "parameters"), (("--mesh", "data=2,tensor=2"), "parameters"))
    for options, zero in (*others, (("--mesh", "pipeline=2,tensor=2"), "none")):
        assert resume(tmp_path, options, "continue", zero) == pytest.approx(wanted, rel=1e-12, abs=1e-13)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_combined_axes_continue_a_checkpoint_of_one_device(tmp_path):
    wanted = resume(tmp_path, (), "save")
    for options, zero in ((("--mesh", "data=2,tensor=2"), "parameters"), (("--mesh", "pipeline=2,tensor=2"), "none")):
        assert resume(tmp_path, options, "continue", zero) == pytest.approx(wanted, rel=1e-12, abs=1e-13)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_saved_plan_has_all_divisions_in_their_order_and_runs(tmp_path):
    write(tmp_path)
    mesh = ("--mesh", "pipeline=2,tensor=2", "--steps", "5")
    saved = rankless("plan", *mesh, "--save", "plan.json", "train.py", folder=tmp_path)
    assert saved.returncode == 0, saved.stdout + saved.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    divisions = plan["jobs"]["train"]["states"]["model.0.weight"]["value"]
    assert [(item["axis"], item["dim"], item["lengths"]) for item in divisions] == [
        ("tensor", 0, [6, 6]),
        ("pipeline", 0, [12, 0]),
    ]
    plain = rankless("run", "--seed", "1", "-q", "train.py", folder=tmp_path)
    planned = rankless("run", "--seed", "1", "-q", "--plan", "plan.json", "train.py", folder=tmp_path)
    assert planned.stdout == plain.stdout, planned.stderr
    assert planned.stdout.startswith("loss ")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_saved_plan_of_stages_in_pieces_runs(tmp_path):
    write(tmp_path, options=", zero='parameters'")
    mesh = ("--mesh", "pipeline=2,data=2", "--steps", "5")
    saved = rankless(
        "plan", *mesh, "--save", "plan.json", "--json", "shown.json", "--picture", "plan.html", "train.py",
        folder=tmp_path,
    )  # fmt: skip
    assert saved.returncode == 0, saved.stdout + saved.stderr
    states = json.loads((tmp_path / "plan.json").read_text())["jobs"]["train"]["states"]
    for kind in ("value", "gradient", "optimizer_state"):
        assert [item["axis"] for item in states["model.0.weight"][kind]] == ["pipeline", "data"]
    shown = json.loads((tmp_path / "shown.json").read_text())["jobs"][0]
    stage = shown["program"]["pipeline"]["stages"][0]["parameter_bytes"]
    assert shown["memory"]["parameters"] == shown["memory"]["gradients"] == stage // 2
    placements = {item["placement"] for item in shown["program"]["inputs"] if item["kind"] == "parameter"}
    assert placements == {"in pieces on the workers of its stage"}
    plain = rankless("run", "--seed", "1", "-q", "train.py", folder=tmp_path)
    planned = rankless("run", "-n", "4", "--seed", "1", "-q", "--plan", "plan.json", "train.py", folder=tmp_path)
    assert planned.stdout == plain.stdout, planned.stderr
    assert planned.stdout.startswith("loss ")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_plan_shows_who_holds_what_along_both_axes(tmp_path):
    write(tmp_path, options=", zero='parameters'")
    mesh = ("--mesh", "data=2,tensor=2", "--steps", "5")
    found = rankless("plan", *mesh, "--json", "plan.json", "--picture", "plan.html", "train.py", folder=tmp_path)
    assert found.returncode == 0, found.stderr
    jobs = {job["program"]["job"]: job for job in json.loads((tmp_path / "plan.json").read_text())["jobs"]}
    gathers = [move for move in jobs["train"]["program"]["moves"] if move["kind"] == "all_gather"]
    assert {move["axis"] for move in gathers} <= {"data", "tensor"}
    assert (
        "dim 0 split 6+6 along tensor, then what is left of dim 0 evenly along data"
        in (tmp_path / "plan.html").read_text()
    )


SEQUENCES = """
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True) for _ in range(2)]
model = torch.nn.Sequential(torch.nn.Embedding(40, 16), *layers, torch.nn.Linear(16, 40))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

@rankless.job(model=model, optimizer=optimizer, plan=rankless.Plan(sequence_parallel={setting}))
def train(words):
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

for _ in range(3):
    loss = train(torch.randint(0, 40, (6, 9)))
print(f"loss {{float(loss):.12f}}")
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_sequence_parallelism_scatters_and_gathers_in_place_of_sums(tmp_path):
    printed, kinds = {}, {}
    for setting in (False, True):
        (tmp_path / "train.py").write_text(SEQUENCES.format(setting=setting))
        options = ("--mesh", "tensor=2", "--steps", "5", "--json", "plan.json", "--save", "saved.json")
        found = rankless("plan", *options, "train.py", folder=tmp_path)
        assert found.returncode == 0, found.stderr
        (job,) = json.loads((tmp_path / "plan.json").read_text())["jobs"]
        large = [move for move in job["program"]["moves"] if move["bytes"] >= 6 * 8 * 16 * 8]
        kinds[setting] = {move["kind"] for move in large}
        assert json.loads((tmp_path / "saved.json").read_text())["jobs"]["train"]["sequence_parallel"] is setting
        ran = rankless("run", "--mesh", "tensor=2", "--seed", "1", "-q", "train.py", folder=tmp_path)
        planned = rankless("run", "-n", "2", "--seed", "1", "-q", "--plan", "saved.json", "train.py", folder=tmp_path)
        printed |= {ran.stdout: setting, planned.stdout: setting}
        assert job["gather_places"] == [], "a planned gather is no operator that runs in full"
    assert kinds == {False: {"all_reduce"}, True: {"all_gather", "reduce_scatter"}}
    assert len(printed) == 1, printed
    assert next(iter(printed)).startswith("loss ")
