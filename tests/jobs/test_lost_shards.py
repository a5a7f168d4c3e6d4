"""Runs with `zero=` and `--copies 1` continue without killed workers, and train what they train on one device."""

import random
from pathlib import Path

import pytest
import torch
from collectives.backends.shared_groups import NEEDS_SHARED_GROUPS
from support.killed_jobs import ZERO_KINDS, require_same_training, run_plain
from support.killed_jobs import run_killed as run_killed_job
from support.lost_shards import FORMS, LEVELS, run_alone, run_killed
from support.warm_runs import rankless, run_script

from rankless.ownership.shard_layout import choose_copy_holders

pytestmark = [pytest.mark.slow, NEEDS_SHARED_GROUPS]  # with Gloo a killed worker ends the run


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> dict[str, dict]:
    """What plain PyTorch trains, by the kind of the script."""
    return {kind: run_plain(tmp_path_factory.mktemp("plain"), kind) for kind in ZERO_KINDS}


def draw_kills(drawn: random.Random) -> dict[int, str]:
    """Return kills by worker: of one, or of two in different epochs, so that the others have copies anew."""
    moments = [[*map(str, range(10)), "predict0", "save0"], [*map(str, range(12, 25)), "once1", "save1", "load1"]]
    delays = (0, drawn.uniform(0, 5), drawn.uniform(0, 50))
    return {
        worker: f"{worker}:{drawn.choice(moments[place])}:{drawn.choice(delays)}"
        for place, worker in enumerate(drawn.sample(range(3), drawn.choice((1, 2))))
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ZERO_KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_kills_at_random_moments_change_no_number(tmp_path: Path, plain, kind: str, seed: int):
    kills = draw_kills(random.Random(1000 * ZERO_KINDS.index(kind) + seed))
    done = run_killed_job(tmp_path, kind, ",".join(kills.values()))
    assert done.returncode == 0, done.stderr
    require_same_training(tmp_path, plain[kind], left=3 - len(kills))


def test_two_workers_are_killed_one_after_the_other(tmp_path: Path, plain):
    done = run_killed_job(tmp_path, "zero gradients accumulate", "0:5:0,2:save1:0")
    assert done.returncode == 0, done.stderr
    require_same_training(tmp_path, plain["zero gradients accumulate"], left=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ZERO_KINDS[1:3])
def test_others_have_copies_of_what_a_frozen_worker_had(tmp_path: Path, plain, kind: str):
    done = run_killed_job(tmp_path, kind, "1:13:frozen", "--hang-timeout", "4")
    assert done.returncode == 0, done.stderr
    require_same_training(tmp_path, plain[kind], left=2)


def require_same(folder: Path, expected: dict, *, left: int) -> None:
    found = [torch.load(path) for path in sorted(folder.glob("results*.pt"))]
    assert len(found) == left
    for results in found:
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.exhaustive
def test_no_form_of_a_script_trains_otherwise(tmp_path_factory: pytest.TempPathFactory, form: str, level: str):
    expected = run_alone(tmp_path_factory.mktemp("alone"), form, level)
    drawn = random.Random(f"{form} {level}")
    for _ in range(3):
        workers = drawn.choice((2, 3, 4))
        moments = [*map(str, range(12)), *(f"after{step}" for step in range(12))]
        if form in ("two models", "sums beside another job"):
            moments += [f"between{step}" for step in range(12)]
        delay = drawn.choice((0, drawn.uniform(0, 6), drawn.uniform(0, 50)))
        kill = f"{drawn.randrange(workers)}:{drawn.choice(moments)}:{delay}"
        folder = tmp_path_factory.mktemp("killed")
        done = run_killed(folder, form, level, workers, kill)
        assert done.returncode == 0, kill + done.stderr
        require_same(folder, expected, left=workers - 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.ci_sample(1)
def test_a_copy_is_as_far_as_the_original(tmp_path: Path, form: str, level: str):
    done = run_killed(tmp_path, form, level, 3, "", SHARDS="1")
    assert done.returncode == 0, done.stderr
    found = [torch.load(path) for path in sorted(tmp_path.glob("shards*.pt"))]
    copies = 0
    for rank, shards in enumerate(found):
        for (number, name, worker), value in shards.items():
            if worker != rank:
                copies += 1
                torch.testing.assert_close(value, found[worker][number, name, worker], rtol=1e-12, atol=1e-12)
    assert copies >= len([key for shards in found for key in shards]) // 2


@pytest.mark.parametrize("kill", ["0:after3:0", "1:after3:1.5", "0:4:3"])
@pytest.mark.exhaustive
def test_two_losses_with_steps_between_them_lose_no_count_of_steps(tmp_path_factory, kill: str):
    # A copy without rows of its own had the count of steps of before the last one.
    expected = run_alone(tmp_path_factory.mktemp("alone"), "Adafactor", "gradients")
    folder = tmp_path_factory.mktemp("killed")
    done = run_killed(folder, "Adafactor", "gradients", 3, f"{kill},2:9:0")
    assert done.returncode == 0, done.stderr
    require_same(folder, expected, left=1)


@pytest.mark.exhaustive
def test_a_worker_and_the_one_with_its_copy_are_lost_together(tmp_path: Path):
    done = run_killed(tmp_path, "Muon", "optimizer", 3, "0:after3:0,1:after3:0")
    assert done.returncode == 137
    assert "and its optimizer state, or a copy of them" in done.stderr


def test_without_copies_the_error_names_the_option(tmp_path: Path):
    text = """
import os, torch, rankless
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer, zero="parameters")
def train(inputs):
    return model(inputs).square().mean()

for step in range(6):
    if step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    train(torch.ones(4, 3))
"""
    done = run_script(text, "-n", "3", "--devices", "cpu", folder=tmp_path)
    assert done.returncode == 137
    log = "".join(path.read_text() for path in tmp_path.rglob("rank0.log"))
    assert "start the run again from a checkpoint, with --copies 1" in log + done.stderr


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("-n", "3", "--copies", "2"), "expected: --copies 0 or 1"),
        (("-n", "1", "--copies", "1"), "found:    one worker"),
        (("-n", "2", "--copies", "1", "--backend", "gloo"), "found:    --backend gloo"),
    ],
)
def test_copies_that_would_help_nobody_are_refused_before_anything_starts(tmp_path: Path, options, found: str):
    text = "import rankless, torch\nevaluate = rankless.job(model=torch.nn.Linear(1, 1))(print)\nprint('begun')\n"
    (tmp_path / "script.py").write_text(text)
    done = rankless("run", *options, "--devices", "cpu", "script.py", folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert found in done.stderr
    assert "begun" not in done.stdout


def test_verify_refuses_copies_of_workers(tmp_path: Path):
    (tmp_path / "script.py").write_text("import rankless\n")
    done = rankless("verify", "-n", "2", "--copies", "1", "script.py", folder=tmp_path)
    assert done.returncode == 2
    assert "expected: --copies with processes beside workers" in done.stderr


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("level", LEVELS)
def test_the_plan_shows_the_memory_of_copies(tmp_path: Path, level: str):
    (tmp_path / "script.py").write_text(f"""
import torch, rankless
model = torch.nn.Linear(1000, 100, bias=False)
optimizer = torch.optim.Adam(model.parameters())

@rankless.job(model=model, optimizer=optimizer, zero={level!r})
def train(inputs):
    return model(inputs).square().mean()

train(torch.ones(4, 1000))
""")
    done = rankless("plan", "-n", "4", "--devices", "cpu", "--copies", "1", "script.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shards = {"optimizer": 2, "gradients": 3, "parameters": 4}[level]  # of 100 kB: two of Adam, gradient, value
    assert f"copies {shards * 100} kB" in " ".join(done.stdout.split()), done.stdout


def test_copies_are_on_other_hosts():
    for hosts in ([0, 0, 1, 1], [0, 1, 2], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2], [0, 1, 1], [0, 0, 0, 1]):
        holders = choose_copy_holders(hosts)
        assert all(hosts[worker] != hosts[holder] for worker, holder in enumerate(holders))
        if hosts.count(0) * 2 <= len(hosts) and hosts != [0, 1, 1]:
            assert sorted(holders) == list(range(len(hosts)))
    assert choose_copy_holders([0, 0]) == (1, 0)
    assert choose_copy_holders([0]) == ()
