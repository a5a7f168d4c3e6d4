"""Background saves: they have the values of the call, and their failure is raised."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoint.saved_objects import SOLO, Holder, Number, loaded_number, save
from support.processes import on_mesh

from rankless.checkpoint import SaveOptions, Saver, load
from rankless.checkpoint.saving import WriteTask
from rankless.errors import CheckpointError

BACKGROUND = SaveOptions(background=True)


@pytest.fixture
def write_gate(monkeypatch):
    """An event that a background save waits for."""
    event = threading.Event()
    run = WriteTask.run

    def run_later(writing):
        assert event.wait(30)
        run(writing)

    monkeypatch.setattr(WriteTask, "run", run_later)
    yield event
    event.set()


def test_a_background_save_has_the_values_of_the_call(tmp_path, write_gate):
    tensor, saver = torch.ones(3), Saver(mesh=SOLO)
    saver.save(tmp_path / "c", {"thing": Holder({"t": tensor})}, options=SaveOptions(background=True, extra=[tensor]))
    tensor.fill_(2)
    assert not (tmp_path / "c").exists()
    write_gate.set()
    saver.wait()
    back = Holder()
    assert load(tmp_path / "c", {"thing": back}, mesh=SOLO).extra[0].tolist() == [1, 1, 1]
    assert back.state["t"].tolist() == [1, 1, 1]


def test_the_next_save_waits_for_the_one_in_the_background(tmp_path, write_gate):
    saver = Saver(mesh=SOLO)
    saver.save(tmp_path / "1", {"number": Number(1)}, options=BACKGROUND)
    write_gate.set()
    saver.save(tmp_path / "2", {"number": Number(2)}, options=BACKGROUND)
    assert loaded_number(tmp_path / "1") == 1
    saver.save(tmp_path / "3", {"number": Number(3)})
    assert [loaded_number(tmp_path / name) for name in "123"] == [1, 2, 3]


def test_the_memory_of_a_background_save_is_used_again(tmp_path):
    saver, tensor = Saver(mesh=SOLO), torch.zeros(1000)
    saver.save(tmp_path / "c", {"thing": Holder({"t": tensor})}, options=BACKGROUND)
    first = saver._background_snapshot.tensors["thing.t"].data_ptr()
    saver.save(tmp_path / "c", {"thing": Holder({"t": tensor + 1})}, options=BACKGROUND)
    assert saver._background_snapshot.tensors["thing.t"].data_ptr() == first
    saver.save(tmp_path / "c", {"thing": Holder({"t": tensor[:5]})}, options=BACKGROUND)
    saver.wait()
    back = Holder()
    load(tmp_path / "c", {"thing": back}, mesh=SOLO)
    assert back.state["t"].tolist() == [0] * 5


def test_a_save_in_inference_mode_and_the_next_outside_of_it(tmp_path):
    saver, model = Saver(mesh=SOLO), torch.nn.Linear(3, 2)
    with torch.inference_mode():
        saver.save(tmp_path / "c", {"model": model, "thing": Holder({"t": torch.ones(2)})}, options=BACKGROUND)
    saver.save(tmp_path / "c", {"model": model, "thing": Holder({"t": torch.ones(2)})}, options=BACKGROUND)
    saver.wait()
    reference = torch.nn.Linear(3, 2)
    load(tmp_path / "c", {"model": reference}, mesh=SOLO)
    assert torch.equal(reference.weight, model.weight)


def test_the_default_device_of_the_script_does_not_matter(tmp_path):
    with torch.device("meta"):
        save(tmp_path / "c", {"thing": Holder({"t": torch.ones(2, device="cpu")})})
        back = Holder()
        load(tmp_path / "c", {"thing": back}, mesh=SOLO)
    assert back.state["t"].tolist() == [1, 1]


def test_an_error_is_raised_by_the_next_call_and_only_once(tmp_path):
    saver = Saver(mesh=SOLO)
    saver.save(tmp_path / "c", {"number": Number(1)})
    for follow_up in (saver.wait, lambda: saver.save(tmp_path / "d", {"number": Number(9)})):
        saver.save(tmp_path / "c", {"number": Number(2)}, options=BACKGROUND)
        fail_running_save(saver, tmp_path)
        with pytest.raises(CheckpointError, match="to write a checkpoint at"):
            follow_up()
        assert loaded_number(tmp_path / "c") == 1
        assert not (tmp_path / "d").exists()
        saver.wait()


def fail_running_save(saver, folder):
    """Make the running save fail."""
    saver._thread.join()
    saver._failures.clear()
    save(folder / "c", {"number": Number(1)})
    saver._failures.append(
        CheckpointError(expected="to write a checkpoint at c", found="a full disk", fix="free space")
    )


def save_with_failing_rank(mesh, path, failing, layout):
    saver = Saver(mesh=mesh)
    options = SaveOptions(background=True, layout=layout)
    objects = {"thing": Holder({"t": torch.zeros(10), "u": torch.ones(10), "v": torch.ones(10)})}
    saver.save(path, objects, options=options)
    saver.wait()
    write = WriteTask._write

    def full(_task):
        raise OSError(28, "No space left on device")

    if mesh.rank == failing:
        WriteTask._write = full
    try:
        saver.save(path, objects, options=options)
        saver.wait()
    except CheckpointError as error:
        first = str(error)
    finally:
        WriteTask._write = write
    saver.save(path, objects, options=options)
    saver.wait()
    return first, sorted(os.listdir(path.parent))


@pytest.mark.ci_sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "failing", "layout"), [(2, 0, "whole"), (2, 1, "sharded"), (3, 2, "sharded"), (3, 0, "sharded")]
)
def test_a_background_failure_raises_on_all_ranks_and_the_next_save_works(tmp_path, ranks, failing, layout):
    answers = on_mesh(ranks, save_with_failing_rank, tmp_path / "c", failing, layout)
    for rank, (error, left) in enumerate(answers):
        assert "No space left" in error, (rank, error)
        assert rank == failing or f"rank {failing} failed" in error, (rank, error)
        assert left == ["c"]


SCRIPT = """
import sys, torch, rankless
from rankless.checkpoint.saving import WriteTask
model = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.Linear(500, 500))
if sys.argv[1] == "failing" and rankless.rank() == rankless.world_size() - 1:
    def full(_task):
        raise OSError(28, "No space left on device")
    WriteTask._write = full
rankless.save("c", model=model, background=True, layout="sharded")
print("at the end")
if sys.argv[1] == "leaving":
    sys.exit(0)
if sys.argv[1] == "raising":
    raise ValueError("of the script's own")
"""


def run(folder: Path, workers: int, how: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    launcher = [] if workers == 0 else ["-m", "rankless", "run", "-n", str(workers), "--devices", "cpu"]
    command = [sys.executable, *launcher, "train.py", how]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("workers", "how"), [(0, "raising"), (2, "ending"), (3, "leaving")])
def test_the_end_of_the_script_waits_for_the_save(tmp_path, workers, how):
    done = run(tmp_path, workers, how)
    assert done.returncode == (1 if how == "raising" else 0), done.stderr
    assert "at the end" in done.stdout
    model = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.Linear(500, 500))
    load(tmp_path / "c", {"model": model}, mesh=SOLO)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "log") == ["c", "train.py"]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 3])
def test_a_background_save_that_fails_at_the_end_of_the_script_is_reported(tmp_path, workers):
    done = run(tmp_path, workers, "failing")
    assert "No space left" in done.stderr
    assert not (tmp_path / "c").exists()
    if workers:
        assert done.returncode == 1
        assert "CheckpointError" in done.stderr
