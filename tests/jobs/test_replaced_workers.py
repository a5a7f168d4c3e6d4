"""A killed worker is replaced by a copy of another one of its host, and the training is that without a loss."""

import random
import re
from pathlib import Path

import pytest
import torch
from collectives.backends.shared_groups import NEEDS_SHARED_GROUPS
from support.killed_jobs import KINDS, ZERO_KINDS, require_same_training, run_killed, run_plain
from support.lost_shards import run_alone, run_killed_on_mesh
from support.server_jobs import summary_of
from support.warm_runs import run_script

pytestmark = [pytest.mark.slow, NEEDS_SHARED_GROUPS]  # with Gloo a killed worker ends the run

MOMENTS = [f"{name}{epoch}" for name in ("predict", "once", "save", "load") for epoch in range(3)][:-1]
ALL_KINDS = (*KINDS, *ZERO_KINDS)


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> dict[str, dict]:
    """What plain PyTorch trains, by the kind of the script."""
    return {kind: run_plain(tmp_path_factory.mktemp("plain"), kind) for kind in ALL_KINDS}


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> dict[str, dict]:
    """What a run without losses trains on worker 1, by the kind of the script."""
    found = {}
    for kind in ALL_KINDS:
        folder = tmp_path_factory.mktemp("undisturbed")
        done = run_killed(folder, kind, "", "-n", "4", replaces=True)
        assert done.returncode == 0, done.stderr
        found[kind] = torch.load(folder / "results1.pt")
    return found


def draw_kills(seed: int, kind: str) -> list[str]:
    """Return kills of one or two of 4 workers at random moments of calls, and between them.

    Of shards there are two copies, so one worker is killed. None is killed after the last save, when others have ended.
    """
    drawn = random.Random(seed)
    workers = drawn.sample(range(4), 1 if kind in ZERO_KINDS else drawn.choice((1, 2)))
    moments = [drawn.choice([*map(str, range(25)), *MOMENTS]) for _ in workers]
    delays = [drawn.choice((0, drawn.uniform(0, 5), drawn.uniform(0, 100))) for _ in workers]
    return [f"{worker}:{moment}:{delay}" for worker, moment, delay in zip(workers, moments, delays, strict=True)]


def require_same_bits(folder: Path, expected: dict) -> None:
    """Check that all workers have the bits of a run without losses: the work is divided as it was."""
    for path in sorted(folder.glob("results*.pt")):
        torch.testing.assert_close(torch.load(path), expected, rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_kills_at_random_moments_change_no_bit(tmp_path: Path, plain, undisturbed, kind: str, seed: int):
    kills = draw_kills(1000 * ALL_KINDS.index(kind) + seed, kind)
    done = run_killed(tmp_path, kind, ",".join(kills), "-n", "4", replaces=True)
    assert done.returncode == 0, (kills, done.stderr)
    assert len(list(tmp_path.glob("results*.pt"))) == 4, (kills, done.stderr)
    require_same_training(tmp_path, plain[kind], left=4)
    require_same_bits(tmp_path, undisturbed[kind])


@pytest.mark.parametrize("worker", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_worker_is_replaced_and_the_summary_says_so(tmp_path: Path, plain, worker: int):
    done = run_killed(tmp_path, "norm and dropout", f"{worker}:12:0", replaces=True)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"rankless: worker {worker} \(pid \d+\) was killed by SIGKILL; 2 workers continue\n", done.stderr)
    replaced = rf"rankless: worker {worker} is replaced by a copy of worker 2 \(pid \d+\); 3 workers\n"
    assert re.search(replaced, done.stderr)
    assert [line[:8] for line in done.stdout.splitlines()] == ["epoch 0:", "epoch 1:", "epoch 2:"]
    summary = summary_of(tmp_path)
    assert (summary.lost_workers, summary.replaced_workers, summary.steps) == (1, 1, 30)
    assert (summary.exit_code, summary.outcome, summary.verdict) == (0, "succeeded", "all workers ended")
    require_same_training(tmp_path, plain["norm and dropout"], left=3)


MESHES = {
    "data=2,tensor=2": ("", 0),
    "data=2,pipeline=2": ("", 0),
    "tensor=2,pipeline=2": ("", 1),
    "data=2,sequence=2": ("", 0),
    "tensor=4": ("", 1),
    "data=2,expert=2": ("gradients", 1),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("worker", [0, 1, 3])
@pytest.mark.parametrize("delay", [0, 4])
def test_workers_of_a_mesh_are_replaced_and_the_mesh_stays(tmp_path: Path, mesh: str, worker: int, delay: int):
    level, copies = MESHES[mesh]
    (tmp_path / "alone").mkdir()
    expected = run_alone(tmp_path / "alone", "AdamW", "")
    done = run_killed_on_mesh(tmp_path, "AdamW", level, mesh, f"{worker}:7:{delay}", copies=copies, replaces=True)
    assert done.returncode == 0, done.stderr
    assert f"worker {worker} is replaced by a copy of worker " in done.stderr
    assert "the mesh is" not in done.stderr
    found = [torch.load(path) for path in sorted(tmp_path.glob("results*.pt"))]
    assert len(found) == 4
    for results in found:
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value, rtol=1e-10, atol=1e-10)


SCRIPT = """
import os, signal, socket, subprocess, sys, threading, time, torch, rankless
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(inputs):
    return model(inputs).square().mean()

rankless.init()
BEFORE
for step in range(8):
    if step in KILLED_AT and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    train(torch.ones(4, 3))
AFTER
print(rankless.world_size(), "workers", flush=True)
"""


def run_with(folder: Path, before: str = "", after: str = "", *options: str, killed_at: str = "(3,)", count: int = 3):
    script = SCRIPT.replace("BEFORE", before).replace("AFTER", after).replace("KILLED_AT", killed_at)
    return run_script(script, "-n", str(count), "--devices", "cpu", *options, folder=folder)


OBSTACLES = {
    "a thread": (
        "threading.Thread(target=time.sleep, args=(8,), name='meter').start()",
        "its script has the thread meter",
    ),
    "a process": ("child = subprocess.Popen(['sleep', '8'])", "its script has a child process"),
    "a file": ("kept = open(f'kept-{os.environ[\"RANK\"]}', 'w')", "open for writing"),
    "a connection": ("ends = socket.socketpair()", "its script has a connection"),
}


@pytest.mark.parametrize("name", OBSTACLES)
@pytest.mark.ci_sample(1)
def test_what_cannot_be_copied_is_named_and_the_others_continue(tmp_path: Path, name: str):
    before, reason = OBSTACLES[name]
    done = run_with(tmp_path, before)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"rankless: worker 1 is not replaced: .*{reason}", done.stderr), done.stderr
    assert done.stdout == "2 workers\n"


@pytest.mark.exhaustive
def test_the_first_worker_is_not_copied(tmp_path: Path):
    done = run_with(tmp_path, count=2)
    assert (done.returncode, done.stdout) == (0, "1 workers\n"), done.stderr
    assert "replaced" not in done.stderr


@pytest.mark.exhaustive
def test_without_replacement_the_others_continue(tmp_path: Path):
    done = run_with(tmp_path, "", "", "--no-replace")
    assert (done.returncode, done.stdout) == (0, "2 workers\n"), done.stderr
    assert "replaced" not in done.stderr


def test_a_call_that_kills_its_workers_comes_to_an_end(tmp_path: Path):
    # each worker but the first dies in it, also one that is a copy
    before = "own_rank = os.environ['RANK']"
    script_line = "if step == 3 and own_rank != '0':\n        os.kill(os.getpid(), 9)\n    if False"
    text = SCRIPT.replace("BEFORE", before).replace("AFTER", "")
    text = text.replace('if step in KILLED_AT and os.environ["RANK"] == "1"', script_line)
    done = run_script(text, "-n", "3", "--devices", "cpu", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "1 workers\n"), done.stderr


@pytest.mark.exhaustive
def test_a_worker_that_dies_again_and_again_is_replaced_as_long_as_steps_are_made(tmp_path: Path):
    done = run_with(tmp_path, killed_at="(2, 4, 6)")
    assert (done.returncode, done.stdout) == (0, "3 workers\n"), done.stderr
    assert done.stderr.count("worker 1 is replaced") == 3
    assert summary_of(tmp_path).replaced_workers == 3
