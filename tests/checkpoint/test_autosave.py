"""A run that is asked to stop saves before its next batch, and started again it makes the training of one device."""

import functools
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.preempted_jobs import FORMS, PLAIN, TRAINING
from support.warm_runs import run_script

import rankless
from rankless import api
from rankless.errors import CheckpointError
from rankless.runtime.stop_requests import StopRequests

pytestmark = pytest.mark.slow
OPTIONS = ("--devices", "cpu")


READERS = {"num_workers": 1, "persistent_workers": True}


def run_plain(folder: Path, every: int = 1, readers: dict | None = None) -> dict:
    (folder / "plain.py").write_text(PLAIN.replace("EVERY", str(every)).replace("READERS", repr(readers or {})))
    subprocess.run([sys.executable, "plain.py"], cwd=folder, check=True)
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> Callable[[str], dict]:
    """Return what plain PyTorch trains for the script of a form."""

    @functools.cache
    def find(every: int, *, reads: bool) -> dict:
        return run_plain(tmp_path_factory.mktemp("plain"), every, READERS if reads else None)

    return lambda form: find(2 if form == "accumulated" else 1, reads=form == "readers")


def require_same(folder: Path, expected: dict) -> None:
    found = torch.load(folder / "results.pt")
    torch.testing.assert_close(found["model"], expected["model"], rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(found["states"], expected["states"], rtol=1e-10, atol=1e-13)
    assert found["losses"] == pytest.approx(expected["losses"][-len(found["losses"]) :], rel=1e-10)


def train_with_stops(folder: Path, text: str, stops: list[tuple[int, int, int]], **variables: str) -> None:
    """Start a script again and again. Each start has a number of workers, the rank that is asked, and its call."""
    for workers, rank, call in stops:
        done = run_script(text, "-n", str(workers), *OPTIONS, folder=folder, STOP=f"{rank}:{call}", **variables)
        assert done.returncode in (0, 75), done.stderr
        if done.returncode == 0:
            return
        if "autosave" in text:
            assert re.search(r"rankless: the run was asked to stop: .*/kept/step-\d+ has its state\n", done.stderr)
        assert "rankless: preempted (exit code 75) after " in done.stderr
    done = run_script(text, "-n", "2", *OPTIONS, folder=folder)
    assert done.returncode == 0, done.stderr


def draw_stops(seed: int) -> list[tuple[int, int, int]]:
    drawn = random.Random(seed)
    sizes = [drawn.randint(1, 3) for _ in range(drawn.randint(2, 4))]
    return [(size, drawn.randrange(size), drawn.randint(1, 20)) for size in sizes]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_script_that_is_stopped_and_started_again_trains_as_one_device(tmp_path: Path, plain, form: str):
    train_with_stops(tmp_path, FORMS[form], draw_stops(len(form)))
    require_same(tmp_path, plain(form))


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_at_random_steps(tmp_path: Path, plain, form: str, seed: int):
    train_with_stops(tmp_path, FORMS[form], draw_stops(1000 + 100 * list(FORMS).index(form) + seed))
    require_same(tmp_path, plain(form))


@pytest.mark.parametrize("call", [9, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_after_the_last_batch_of_a_pass_the_next_pass_begins_after_what_the_script_does_between(
    tmp_path: Path, plain, call: int
):
    train_with_stops(tmp_path, TRAINING, [(2, 1, call)], PAUSE="0.25")  # ranks tell each other at each step
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"step-9" if call == 9 else "step-8"}
    require_same(tmp_path, plain("plain"))


def test_a_request_in_the_last_pass_that_comes_too_late_to_save_leaves_a_complete_run(tmp_path: Path, plain):
    done = run_script(TRAINING, "-n", "2", *OPTIONS, folder=tmp_path, STOP="0:36")
    assert done.returncode == 0, done.stderr
    require_same(tmp_path, plain("plain"))


def test_steps_that_are_numbered_otherwise_are_refused_at_the_first_save(tmp_path: Path):
    text = TRAINING.replace(
        "    schedule.step()\n", "    schedule.step()\n    checkpoints.save(epoch, loader=loader)\n"
    )
    done = run_script(text, "-n", "2", *OPTIONS, folder=tmp_path)
    assert done.returncode == 1
    assert "expected: step 9, as autosave=True counts batches of the loader" in done.stderr
    assert "found:    step 0" in done.stderr
    assert "autosave=lambda: …" in done.stderr


@pytest.fixture
def own_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process watch for requests to stop during a test alone."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(api, "REQUESTS", StopRequests())
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("own_requests")
@pytest.mark.parametrize(("loaders", "found"), [(0, "0 of them"), (2, "2 of them")])
def test_objects_without_one_loader_are_refused(tmp_path: Path, loaders: int, found: str):
    checkpoints = rankless.checkpoints(tmp_path / "kept", autosave=True)
    named = {f"loader{number}": rankless.loader(range(4)) for number in range(loaders)}
    with pytest.raises(CheckpointError, match=rf"(?s)one rankless.loader among the objects.*{found}.*stopping"):
        checkpoints.load(model=torch.nn.Linear(1, 1), **named)


@pytest.mark.usefixtures("own_requests")
def test_what_is_no_step_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"(?s)found:.*'yes'.*autosave=lambda: step"):
        rankless.checkpoints(tmp_path / "kept", autosave="yes")
    checkpoints = rankless.checkpoints(tmp_path / "kept", autosave=lambda: None)
    loader = rankless.loader(range(4))
    checkpoints.load(loader=loader)
    with pytest.raises(CheckpointError, match=r"(?s)a whole number from 0 on.*None"):
        checkpoints.save(1, loader=loader)


@pytest.mark.usefixtures("own_requests")
def test_a_stop_saves_what_was_trained_after_a_save_of_the_same_number(tmp_path: Path):
    checkpoints = rankless.checkpoints(tmp_path / "kept", autosave=lambda: 7, background=True)
    loader = rankless.loader(range(4))
    checkpoints.save(7, metric=0.5, loader=loader)
    checkpoints.load("best", model=torch.nn.Linear(1, 1), strict=False)  # without a loader: changes nothing
    batches = iter(loader)
    assert next(batches).item() == 0
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        next(batches)
    assert stopped.value.code == 75
    resumed = rankless.loader(range(4))
    checkpoints.load(loader=resumed)
    assert resumed.position == 1
