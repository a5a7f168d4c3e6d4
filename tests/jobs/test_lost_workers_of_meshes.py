"""Runs on meshes continue without killed workers, on a mesh of the others, and train what one device trains."""

import random
import re
from pathlib import Path

import pytest
import torch
from collectives.backends.shared_groups import NEEDS_SHARED_GROUPS
from support.killed_jobs import require_same_training, run_plain
from support.killed_jobs import run_killed as run_killed_job
from support.killed_jobs import write_script as write_killed_job
from support.lost_shards import FORMS, FORMS_OF_MESHES, LEVELS, run_alone, run_killed_on_mesh
from support.server_jobs import summary_of
from support.warm_runs import rankless

from rankless.config.mesh_option import count_workers, format_mesh, parse_mesh
from rankless.runtime.worker_recovery import choose_axes

pytestmark = [pytest.mark.slow, NEEDS_SHARED_GROUPS]  # with Gloo a killed worker ends the run

WITHOUT_COPIES = (
    "data=2,tensor=2",
    "data=2,pipeline=2",
    "data=2,expert=2",
    "data=2,sequence=2",
    "data=3,tensor=2",
    "data=2,tensor=2,pipeline=2",
)
"""What one worker has of a model, another one has too."""
WITH_COPIES = ("tensor=2", "pipeline=2", "tensor=3", "pipeline=3", "tensor=2,pipeline=2")
"""Each worker alone has a part of the model."""
WITH_ZERO = ("data=2,tensor=2", "data=2,pipeline=2", "data=2,expert=2")
MOMENTS = [*map(str, range(12)), *(f"after{step}" for step in range(12))]
READ_WHOLE = ("Muon", "Adafactor")
"""Forms whose optimizers step on whole parameters, which other axes than `data` and `pipeline` would divide."""


def pair(meshes: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the forms of scripts, each with the meshes on which they run."""
    forms = [*FORMS, *FORMS_OF_MESHES]  # the first one, which CI runs, is a small one
    pairs = [(form, mesh) for form in forms for mesh in meshes]
    return [pair for pair in pairs if pair[0] not in READ_WHOLE or not re.search("tensor|expert", pair[1])]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """What a form of a script trains on one device."""
    known: dict[str, dict] = {}

    def find(form: str) -> dict:
        if form not in known:
            known[form] = run_alone(tmp_path_factory.mktemp("alone"), form, "")
        return known[form]

    return find


def require_same(folder: Path, expected: dict, left: int) -> None:
    found = [torch.load(path) for path in sorted(folder.glob("results*.pt"))]
    assert len(found) == left
    for results in found:
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value, rtol=1e-10, atol=1e-10)


def train_with_kill(folder: Path, form: str, mesh: str, trained, *, level: str = "", copies: int = 0) -> None:
    drawn, workers, moments = random.Random(f"{form} {mesh} {level}"), count_workers(parse_mesh(mesh)), MOMENTS
    if form in ("two models", "sums beside another job"):
        moments = [*MOMENTS, *(f"between{step}" for step in range(12))]
    delay = drawn.choice((0, drawn.uniform(0, 6), drawn.uniform(0, 50)))
    kill = f"{drawn.randrange(workers)}:{drawn.choice(moments)}:{delay}"
    done = run_killed_on_mesh(folder, form, level, mesh, kill, copies=copies)
    assert done.returncode == 0, kill + done.stderr
    assert "rankless: the mesh is " in done.stderr
    require_same(folder, trained(form), workers - 1)


@pytest.mark.parametrize(("form", "mesh"), pair(WITHOUT_COPIES))
@pytest.mark.ci_sample(1)
def test_no_form_of_a_script_trains_otherwise_on_a_mesh(tmp_path: Path, trained, form: str, mesh: str):
    train_with_kill(tmp_path, form, mesh, trained)


@pytest.mark.parametrize(("form", "mesh"), pair(WITH_COPIES))
@pytest.mark.ci_sample(1)
def test_copies_stand_in_for_a_part_of_the_model(tmp_path: Path, trained, form: str, mesh: str):
    train_with_kill(tmp_path, form, mesh, trained, copies=1)


@pytest.mark.parametrize(("form", "mesh"), pair(WITH_ZERO))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.ci_sample(1)
def test_copies_stand_in_for_shards_of_what_other_axes_leave(tmp_path, trained, form: str, mesh: str, level: str):
    train_with_kill(tmp_path, form, mesh, trained, level=level, copies=1)


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> dict:
    return run_plain(tmp_path_factory.mktemp("plain"), "accumulate")


KILLS = {
    "rank 0 in the first call": "0:0:0",
    "another in the first call": "3:0:30",
    "at a call": "1:7:0",
    "in a call": "2:9:1",
    "in a collective": "0:11:2.5",
    "at a step": "3:5:4",
    "at the end of a pass": "1:predict0:0",
    "in once": "0:once0:0",
    "in a save": "2:save1:1",
    "in a load": "3:load0:0.5",
    "two, one after the other": "1:4:0,2:save1:0",
    "two at once": "0:13:0,1:13:0",
}


@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "data=2,pipeline=2"])
@pytest.mark.parametrize("name", KILLS)
@pytest.mark.ci_sample(1)
def test_a_kill_at_each_moment_changes_no_number(tmp_path: Path, plain, name: str, mesh: str):
    kills = KILLS[name]
    if name == "two at once" and "pipeline" in mesh:
        kills = "0:13:0,2:13:0"  # 0 and 1 have the same stage
    done = run_killed_job(tmp_path, "accumulate", kills, "-n", "4", "--mesh", mesh)
    assert done.returncode == 0, done.stderr
    left = 4 - len(kills.split(","))
    require_same_training(tmp_path, plain, left=left)
    assert summary_of(tmp_path).lost_workers == 4 - left


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "copies"), [("data=2,tensor=2", "0"), ("data=2,pipeline=2", "0"), ("data=4", "1")])
def test_a_run_with_a_plan_continues_without_it(tmp_path: Path, mesh: str, copies: str):
    kind = "accumulate" if copies == "0" else "zero gradients accumulate"
    write_killed_job(tmp_path, kind)
    planned = rankless(
        "plan", "-n", "4", "--devices", "cpu", "--mesh", mesh, "--save", "plan.json", "script.py", folder=tmp_path
    )
    assert planned.returncode == 0, planned.stderr
    options = ("-n", "4", "--copies", copies, "--plan", "plan.json")
    done = run_killed_job(tmp_path, kind, "1:7:0", *options)
    assert done.returncode == 0, done.stderr
    assert "without the plan that was given" in done.stderr
    (tmp_path / "plain").mkdir()
    require_same_training(tmp_path, run_plain(tmp_path / "plain", kind), left=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "data=2,pipeline=2"])
def test_a_frozen_worker_of_a_mesh_is_a_lost_one(tmp_path: Path, plain, mesh: str):
    done = run_killed_job(tmp_path, "accumulate", "1:13:frozen", "-n", "4", "--mesh", mesh, "--hang-timeout", "4")
    assert done.returncode == 0, done.stderr
    require_same_training(tmp_path, plain, left=3)


@pytest.mark.exhaustive
def test_all_workers_that_have_a_part_of_the_model_are_lost(tmp_path: Path):
    done = run_killed_job(tmp_path, "accumulate", "0:13:0,2:13:0", "-n", "4", "--mesh", "data=2,tensor=2")
    assert done.returncode == 137
    assert "and its optimizer state, or a copy of them" in done.stderr


def test_a_job_with_zero_on_a_mesh_needs_copies(tmp_path: Path):
    done = run_killed_on_mesh(tmp_path, "experts", "gradients", "data=2,expert=2", "1:3:0", copies=0)
    assert done.returncode == 137
    log = "".join(path.read_text() for path in tmp_path.rglob("rank0.log"))
    assert "start the run again from a checkpoint, with --copies 1" in log + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "zero", "shards"),
    [
        ("tensor=2", None, 8),
        ("pipeline=2", None, 8),
        ("data=2,tensor=2", "parameters", 4),
        ("data=2,tensor=2", None, 0),
    ],
)
def test_the_plan_shows_the_memory_of_copies_on_a_mesh(tmp_path: Path, mesh: str, zero: str | None, shards: int):
    (tmp_path / "script.py").write_text(f"""
import torch, rankless
layers = torch.nn.Linear(250, 400, bias=False), torch.nn.ReLU(), torch.nn.Linear(400, 250, bias=False)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters())

@rankless.job(model=model, optimizer=optimizer, zero={zero!r})
def train(inputs):
    return model(inputs).square().mean()

train(torch.ones(4, 250))
""")
    workers = str(count_workers(parse_mesh(mesh)))
    command = ("plan", "-n", workers, "--devices", "cpu", "--mesh", mesh, "--copies", "1", "script.py")
    done = rankless(*command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    shown = f"copies {shards * 200 / 1000:g} MB" if shards * 200 >= 1000 else f"copies {shards * 200} kB"
    assert (shown in text) if shards else ("copies" not in text), text  # value, gradient and two entries of Adam


def test_a_mesh_keeps_its_other_axes_where_it_can():
    def choose(mesh: str, count: int) -> str:
        return format_mesh([axis for axis in choose_axes(parse_mesh(mesh), count) if axis.size > 1])

    assert choose("data=4,tensor=2", 6) == "data=3,tensor=2"
    assert choose("data=2,tensor=4", 6) == "data=3,tensor=2"
    assert choose("data=2,tensor=2", 3) == "data=3"
    assert choose("pipeline=2,data=2,tensor=2", 6) == "data=3,tensor=2"
    assert choose("pipeline=2,data=2,tensor=2", 4) == "pipeline=2,tensor=2"
    assert choose("tensor=6", 4) == "data=2,tensor=2"
    assert choose("tensor=6", 3) == "tensor=3"
    assert choose("data=2,sequence=2", 1) == ""
