"""Runs of jobs on CPUs continue without killed workers, and train what plain PyTorch does on one device."""

import random
import re
from pathlib import Path

import pytest
from collectives.backends.shared_groups import NEEDS_SHARED_GROUPS
from support.killed_jobs import KINDS, require_same_training, run_killed, run_plain
from support.server_jobs import summary_of
from support.warm_runs import rankless, run_script

pytestmark = [pytest.mark.slow, NEEDS_SHARED_GROUPS]  # with Gloo a killed worker ends the run

MOMENTS = [f"{name}{epoch}" for name in ("predict", "once", "save", "load") for epoch in range(3)][:-1]
"""What the script does beside training calls; the end of a pass over the loader is before `predict`."""


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> dict[str, dict]:
    """What plain PyTorch trains, by the kind of the script."""
    return {kind: run_plain(tmp_path_factory.mktemp("plain"), kind) for kind in KINDS}


def draw_kills(seed: int) -> dict[int, str]:
    """Return kills of one or two workers at random moments of calls, and between them, by worker.

    None is after the last save: a worker that is killed when all others have ended ends the run.
    """
    drawn = random.Random(seed)
    return {
        worker: f"{worker}:{drawn.choice([*map(str, range(25)), *MOMENTS])}:"
        f"{drawn.choice((0, drawn.uniform(0, 5), drawn.uniform(0, 100)))}"
        for worker in drawn.sample(range(3), drawn.choice((1, 1, 2)))
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(40))
def test_kills_at_random_moments_change_no_number(tmp_path: Path, plain, kind: str, seed: int):
    kills = draw_kills(1000 * KINDS.index(kind) + seed)
    done = run_killed(tmp_path, kind, ",".join(kills.values()))
    assert done.returncode == 0, done.stderr
    require_same_training(tmp_path, plain[kind], left=3 - len(kills))


@pytest.mark.exhaustive
@pytest.mark.parametrize("delay", [0, 1, 30])
@pytest.mark.parametrize("moment", ["0", "1", *MOMENTS[::3]])
def test_a_kill_in_each_thing_that_workers_do_together_changes_no_number(tmp_path, plain, moment, delay):
    done = run_killed(tmp_path, "norm and dropout", f"0:{moment}:{delay}")
    assert done.returncode == 0, done.stderr
    require_same_training(tmp_path, plain["norm and dropout"], left=2)


def test_two_workers_are_killed_and_the_summary_says_so(tmp_path: Path, plain):
    done = run_killed(tmp_path, "norm and dropout", "0:12:0,2:save1:0")
    assert done.returncode == 0, done.stderr
    assert re.search(r"rankless: worker 0 \(pid \d+\) was killed by SIGKILL; 2 workers continue\n", done.stderr)
    assert re.search(r"rankless: worker 2 \(pid \d+\) was killed by SIGKILL; 1 worker continues\n", done.stderr)
    assert [line[:8] for line in done.stdout.splitlines()] == ["epoch 0:", "epoch 1:", "epoch 2:"]
    summary = summary_of(tmp_path)
    assert (summary.lost_workers, summary.exit_code, summary.outcome, summary.steps) == (2, 0, "succeeded", 30)
    require_same_training(tmp_path, plain["norm and dropout"], left=1)


@pytest.mark.parametrize("worker", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS[1:])])
def test_a_frozen_worker_that_the_watchdog_gives_up_on_is_a_lost_one(tmp_path: Path, plain, kind: str, worker: int):
    done = run_killed(tmp_path, kind, f"{worker}:13:frozen", "--hang-timeout", "4")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"rankless: rank {worker} did not arrive: it is stopped by a signal", done.stderr), done.stderr
    assert re.search(rf"rankless: worker {worker} .* was killed by SIGKILL; 2 workers continue\n", done.stderr)
    require_same_training(tmp_path, plain[kind], left=2)


@pytest.mark.exhaustive
def test_a_frozen_worker_without_which_none_may_continue_ends_the_run(tmp_path: Path):
    done = run_killed(tmp_path, "norm and dropout", "1:13:frozen", "--hang-timeout", "4", "--min-workers", "3")
    assert done.returncode == 1
    assert "continue\n" not in done.stderr
    assert "rank 1 " in done.stderr


@pytest.mark.exhaustive
def test_no_more_workers_are_lost_than_the_option_allows(tmp_path: Path):
    done = run_killed(tmp_path, "norm and dropout", "0:3:0,1:9:0", "--min-workers", "2")
    assert done.returncode == 137
    assert "was killed by SIGKILL; 2 workers continue" in done.stderr
    assert "rankless: rank 1 was killed by signal 9 (SIGKILL)\n" in done.stderr


@pytest.mark.exhaustive
def test_with_as_many_as_at_the_start_the_first_killed_worker_ends_the_run(tmp_path: Path):
    done = run_killed(tmp_path, "norm and dropout", "1:3:0", "--min-workers", "3")
    assert done.returncode == 137
    assert "continue" not in done.stderr


STATEMENTS = {
    "mirrored": '@rankless.job(model=model, optimizer=optimizer, view="mirrored")',
    "uncaptured": "@rankless.job(model=model, optimizer=optimizer, capture=False)",
    "sharded": '@rankless.job(model=model, optimizer=optimizer, zero="parameters")',
    "own collective": "@rankless.job(model=model)",
}
REFUSED = """
import os, torch, rankless
from rankless import collectives
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

STATEMENT
def train(inputs):
    return model(inputs).square().mean()

rankless.init()
for step in range(6):
    if step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    if NAME == "own collective":
        collectives.all_reduce(torch.ones(3))
    else:
        train(torch.ones(4, 3))
"""


@pytest.mark.parametrize("name", STATEMENTS)
@pytest.mark.ci_sample(1)
def test_a_job_that_cannot_go_on_ends_and_the_killed_worker_is_the_cause(tmp_path: Path, name: str):
    text = f"NAME = {name!r}\n" + REFUSED.replace("STATEMENT", STATEMENTS[name])
    done = run_script(text, "-n", "3", "--devices", "cpu", folder=tmp_path)
    assert done.returncode == 137, done.stderr
    assert "rankless: rank 1 was killed by signal 9 (SIGKILL)" in done.stderr


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--min-workers", "4"), "expected: --min-workers from 1 to 3"),
        (("--min-workers", "0"), "expected: --min-workers from 1 to 3"),
        (("--min-workers", "2", "--mesh", "tensor=3"), "found:    the axis tensor and no axis data"),
        (("--min-workers", "2", "--backend", "gloo"), "found:    --backend gloo"),
        (("--min-workers", "2", "--logical"), "found:    a script without jobs in the logical view"),
        (("--lost-workers", "2"), "--lost-workers is now --min-workers N"),
        (("--servers", "1", "--replicas", "1"), "--replicas is now --copies N"),
        (("--copy",), "--copy is now --send-script"),
    ],
)
def test_options_that_no_run_can_have_are_refused_before_it_starts(tmp_path: Path, options, found: str):
    (tmp_path / "script.py").write_text("import rankless\nrankless.rank()\n")
    done = rankless("run", "-n", "3", "--devices", "cpu", *options, "script.py", folder=tmp_path)
    assert done.returncode == 2
    assert found in done.stderr


DAMAGED = """
import os, signal, torch, rankless

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, number):
        if number == 23:
            if os.environ["RANK"] == "2":
                os.kill(os.getpid(), 9)
            raise ValueError("damaged")
        return torch.full((3,), float(number))

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

@rankless.job(model=model, optimizer=optimizer)
def train(rows):
    return model(rows).square().mean()

steps = 0
try:
    for rows in rankless.loader(Samples(), batch_size=12):
        train(rows)
        steps += 1
except rankless.errors.DataError as error:
    train(torch.ones(6, 3))
    print(f"{steps} steps, {rankless.world_size()} workers: {error.found}", flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [(), ("--mesh", "data=2,tensor=2")])
def test_a_damaged_sample_that_is_read_again_after_a_loss_is_the_error_of_all_others(tmp_path: Path, options):
    (tmp_path / "script.py").write_text(DAMAGED)
    words = ("-n", "4" if options else "3", "--devices", "cpu", "--no-replace", *options, "script.py")
    done = rankless("run", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"1 steps, {3 if options else 2} workers: ValueError: damaged"), done.stdout
