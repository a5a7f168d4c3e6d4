"""A killed worker is replaced by a copy of another one of its host, and the training is that without a loss."""

import functools
import random
import re
from collections.abc import Callable
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
def plain(tmp_path_factory) -> Callable[[str], dict]:
    """What plain PyTorch trains, for a kind of script."""
    return functools.cache(lambda kind: run_plain(tmp_path_factory.mktemp("plain"), kind))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Callable[[str], dict]:
    """What a run without losses trains on worker 1, for a kind of script."""

    def train(kind: str) -> dict:
        folder = tmp_path_factory.mktemp("undisturbed")
        done = run_killed(folder, kind, "", "-n", "4", replaces=True)
        assert done.returncode == 0, done.stderr
        return torch.load(folder / "results1.pt")

    return functools.cache(train)


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
    require_same_training(tmp_path, plain(kind), left=4)
    require_same_bits(tmp_path, undisturbed(kind))


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
    require_same_training(tmp_path, plain("norm and dropout"), left=3)


def test_a_copy_is_copied_itself(tmp_path: Path, plain):
    done = run_killed(tmp_path, "norm and dropout", "2:4:0,1:12:0", "-n", "3", replaces=True)
    assert done.returncode == 0, done.stderr
    assert "worker 2 is replaced by a copy of worker 1 " in done.stderr
    assert "worker 1 is replaced by a copy of worker 2 " in done.stderr
    require_same_training(tmp_path, plain("norm and dropout"), left=3)


MESHES = {
    "data=2,tensor=2": ("transformer", "", 0),
    "data=2,pipeline=2": ("transformer", "", 0),
    "tensor=2,pipeline=2": ("transformer", "", 1),
    "data=2,sequence=2": ("transformer", "", 0),
    "tensor=4": ("transformer", "", 1),
    "data=2,expert=2": ("experts", "gradients", 1),
}
IN_CI = ("expert=2", 1, 0)


@pytest.mark.parametrize(
    ("mesh", "worker", "delay"),
    [
        pytest.param(mesh, worker, delay, marks=() if (mesh[-8:], worker, delay) == IN_CI else pytest.mark.exhaustive)
        for mesh in MESHES
        for worker in (0, 1, 3)
        for delay in (0, 4)
    ],
)
def test_workers_of_a_mesh_are_replaced_and_the_mesh_stays(tmp_path: Path, mesh: str, worker: int, delay: int):
    form, level, copies = MESHES[mesh]
    (tmp_path / "alone").mkdir()
    expected = run_alone(tmp_path / "alone", form, "")
    done = run_killed_on_mesh(tmp_path, form, level, mesh, f"{worker}:7:{delay}", copies=copies, replaces=True)
    assert done.returncode == 0, done.stderr
    assert f"worker {worker} is replaced by a copy of worker " in done.stderr
    assert "the mesh is" not in done.stderr
    found = [torch.load(path) for path in sorted(tmp_path.glob("results*.pt"))]
    assert len(found) == 4
    for results in found:
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value, rtol=1e-10, atol=1e-10)


SCRIPT = """
import os, random, signal, socket, subprocess, sys, threading, time
import numpy, torch, rankless

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
features = torch.cos(torch.outer(torch.arange(96.0), torch.arange(1.0, 7.0)))
targets = torch.sin(torch.arange(96.0))[:, None]
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.GELU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(features, targets)
options = {}


@rankless.job(model=model, optimizer=optimizer)
def train(inputs, wanted):
    return torch.nn.functional.mse_loss(model(inputs), wanted)


rankless.init()
BEFORE
step = 0
for epoch in range(2):
    for inputs, wanted in rankless.loader(data, batch_size=16, shuffle=True, **options):
        if KILL_IF:
            os.kill(os.getpid(), 9)
        IN_STEP
        loss = float(train(inputs, wanted))
        step += 1
total = sum(float(item.detach().sum()) for item in model.parameters())
print(repr(loss), repr(total), rankless.world_size(), "workers")
"""
KILLED = "step == 3 and os.environ['RANK'] == '1'"


def run_with(folder: Path, *options: str, before: str = "", in_step: str = "", kill_if: str = KILLED, count: int = 3):
    text = SCRIPT.replace("BEFORE", before).replace("IN_STEP", in_step).replace("KILL_IF", kill_if)
    folder.mkdir(exist_ok=True)
    return run_script(text, "-n", str(count), "--devices", "cpu", "--seed", "1", *options, folder=folder)


def count_left(done) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-2]


READ_FROM_A_FILE = """
name = f"rows{os.getpid()}"
torch.cat([features, targets], dim=1).numpy().tofile(name)

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.file = open(name, "rb", buffering=0)

    def __len__(self):
        return 96

    def __getitem__(self, number):
        self.file.seek(number * 56)
        time.sleep(0.001)  # two processes with one position would read each other's rows
        row = torch.frombuffer(bytearray(self.file.read(56)), dtype=torch.float64)
        return row[:6], row[6:]

data = Rows()
"""
DRAWN = """
class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, number):
        return features[number] + random.random() + numpy.random.rand() + torch.rand(()), targets[number]

data = Drawn()
"""
FORMS = {
    "a data set with an open file": {"before": READ_FROM_A_FILE},
    "more threads than one": {"before": "torch.set_num_threads(3); big = torch.ones(700, 700)", "in_step": "big @ big"},
    "a model in shared memory": {"before": "model.share_memory()"},
    "samples with random numbers": {"before": DRAWN},
    "readers that live on": {"before": DRAWN + "options = {'num_workers': 2, 'persistent_workers': True}"},
    "a gather in each step": {
        "before": "drawn = torch.Generator().manual_seed(5)",
        "in_step": "inputs = inputs + torch.rand(inputs.shape, generator=drawn)",
    },
    "a log of the first worker": {
        "before": "log = open('log.csv', 'w') if rankless.rank() == 0 else None",
        "in_step": "log and log.write('step')",
    },
    "an average outside the job": {
        "before": "average = torch.optim.swa_utils.AveragedModel(model)",
        "in_step": "average.update_parameters(model)",
    },
    "once in each step": {"in_step": "assert rankless.once(lambda: 7) == 7"},
    "a save in the background": {"in_step": "rankless.save('kept', model=model, background=True)"},
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.ci_sample(1)
def test_no_bit_changes_in_the_forms_that_people_write(tmp_path: Path, name: str):
    undisturbed = run_with(tmp_path / "whole", kill_if="False", **FORMS[name])
    done = run_with(tmp_path / "killed", **FORMS[name])
    assert "worker 1 is replaced by a copy of worker 2" in done.stderr, done.stderr
    assert count_left(done) == "3"
    assert done.stdout == undisturbed.stdout


@pytest.mark.exhaustive
def test_a_worker_that_has_imported_torch_itself_is_replaced(tmp_path: Path):
    undisturbed = run_with(tmp_path / "whole", "--no-warm", kill_if="False")
    done = run_with(tmp_path / "killed", "--no-warm")
    assert "worker 1 is replaced by a copy of worker 2" in done.stderr, done.stderr
    assert done.stdout == undisturbed.stdout


OBSTACLES = {
    "a thread": ("threading.Thread(target=time.sleep, args=(8,), name='meter').start()", "has the thread meter"),
    "a thread of a library": (
        "import _thread, ctypes; "
        "_thread.start_new_thread(lambda: (ctypes.CDLL(None).prctl(15, b'polars-0', 0, 0, 0), time.sleep(60)), ())",
        "a library that it uses has the thread polars-0",
    ),
    "a process": ("child = subprocess.Popen(['sleep', '8'])", "its script has a child process"),
    "a file": ("kept = open(f'kept-{os.environ[\"RANK\"]}', 'w')", "open for writing"),
    "a connection": ("ends = socket.socketpair()", "its script has a connection"),
}


@pytest.mark.parametrize("name", OBSTACLES)
@pytest.mark.ci_sample(1)
def test_what_cannot_be_copied_is_named(tmp_path: Path, name: str):
    before, reason = OBSTACLES[name]
    done = run_with(tmp_path, before=before)
    assert re.search(rf"rankless: worker 1 is not replaced: .*{reason}", done.stderr), done.stderr
    assert count_left(done) == "2"


@pytest.mark.exhaustive
def test_the_first_worker_of_a_script_that_names_ranks_is_not_copied(tmp_path: Path):
    done = run_with(tmp_path, count=2)
    assert count_left(done) == "1"
    assert "replaced" not in done.stderr


@pytest.mark.exhaustive
def test_the_first_worker_of_a_script_without_ranks_is_copied(tmp_path: Path):
    # the child of a process with an even id is killed once
    (tmp_path / "killed.py").write_text("import os\nIS_OTHER = os.environ['RA' + 'NK'] == '1'\n")
    text = SCRIPT.replace("BEFORE", "from killed import IS_OTHER").replace("IN_STEP", "")
    text = text.replace("KILL_IF", "step == 3 and IS_OTHER")
    done = run_script(text, "-n", "2", "--devices", "cpu", folder=tmp_path)
    assert "worker 1 is replaced by a copy of worker 0" in done.stderr, done.stderr
    assert count_left(done) == "2"


@pytest.mark.exhaustive
def test_without_replacement_the_others_continue(tmp_path: Path):
    done = run_with(tmp_path, "--no-replace")
    assert count_left(done) == "2"
    assert "replaced" not in done.stderr


@pytest.mark.exhaustive
def test_a_call_that_kills_its_workers_comes_to_an_end(tmp_path: Path):
    # all but the first die in it, also the copies
    done = run_with(tmp_path, before="is_first = rankless.rank() == 0", kill_if="step == 3 and not is_first")
    assert count_left(done) == "1"


@pytest.mark.exhaustive
def test_a_worker_that_dies_again_and_again_is_replaced_as_long_as_steps_are_made(tmp_path: Path):
    done = run_with(tmp_path, kill_if="step in (2, 4, 6) and os.environ['RANK'] == '1'")
    assert count_left(done) == "3"
    assert summary_of(tmp_path).replaced_workers == 3


@pytest.mark.exhaustive
def test_what_a_copy_raises_has_the_number_of_the_lost_worker(tmp_path: Path):
    done = run_with(tmp_path, in_step="assert step != 7 or os.environ['RANK'] != '1', 'seven'")
    assert done.returncode == 1
    assert "rankless: rank 1 raised AssertionError: seven" in done.stderr, done.stderr
