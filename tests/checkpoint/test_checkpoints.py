"""The checkpoints of a run: which are kept, which load, and what a killed or failed save leaves of them."""

import os
import shutil

import msgspec
import pytest
import torch
from checkpoint.killed_saves import Countdown
from checkpoint.saved_objects import SOLO, Holder, Number
from support.processes import on_mesh

import rankless
from rankless.checkpoint import Checkpoints, Retention, RunFunctions, SaveOptions, Saver, checkpoint_series
from rankless.checkpoint.manifest import encode_manifest
from rankless.checkpoint.manifest_io import peek, read_manifest
from rankless.errors import CheckpointError


def open_checkpoints(folder, mesh=SOLO, messages=None, background=False, layout="whole", **retention):
    saver = Saver(mesh=mesh)
    options = SaveOptions(background=background, layout=layout)
    notify = [].append if messages is None else messages.append
    return Checkpoints(
        folder,
        retention=Retention(**retention),
        options=options,
        run=RunFunctions(find_saver=lambda: saver, notify=notify),
    )


def save_metrics(checkpoints, metrics, start=1):
    for step, metric in enumerate(metrics, start):
        checkpoints.save(step, metric=metric, number=Number(step))


def loaded(checkpoints, which="latest"):
    number = Number()
    restored = checkpoints.load(which, number=number)
    return restored and (restored.step, number.value, restored.metric)


@pytest.mark.parametrize("background", [False, True])
def test_the_last_and_the_best_are_kept_and_the_others_removed(tmp_path, background):
    checkpoints = open_checkpoints(tmp_path / "a", keep_last=2, keep_best=1, background=background)
    save_metrics(checkpoints, [0.5, 0.2, 0.9, 0.4, 0.3])
    checkpoints.wait()
    assert checkpoints.steps == [2, 4, 5]
    assert sorted(os.listdir(tmp_path / "a")) == ["step-2", "step-4", "step-5"]
    assert loaded(checkpoints) == (5, 5, 0.3)
    assert loaded(checkpoints, "best") == (2, 2, 0.2)
    assert loaded(checkpoints, 4) == (4, 4, 0.4)
    assert checkpoints.latest == tmp_path / "a" / "step-5"
    assert checkpoints.best == tmp_path / "a" / "step-2"


def test_the_best_is_the_largest_with_mode_max_and_the_first_of_equals(tmp_path):
    checkpoints = open_checkpoints(tmp_path, keep_last=1, keep_best=2, mode="max")
    save_metrics(checkpoints, [0.5, torch.tensor(0.75), 0.75, 0.1, float("nan")])
    assert checkpoints.steps == [2, 3, 5]
    assert loaded(checkpoints, "best") == (2, 2, 0.75)
    assert loaded(checkpoints) == (5, 5, None)


def test_by_default_all_checkpoints_are_kept(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    save_metrics(checkpoints, [None] * 4)
    assert checkpoints.steps == [1, 2, 3, 4]
    assert checkpoints.best is None
    assert loaded(checkpoints, "best") is None


def test_a_new_run_in_an_old_folder_keeps_its_own_checkpoints(tmp_path):
    save_metrics(open_checkpoints(tmp_path, keep_last=2), [None] * 3, start=1000)
    checkpoints = open_checkpoints(tmp_path, keep_last=2)
    save_metrics(checkpoints, [None] * 2)
    assert checkpoints.steps == [1, 2]
    assert loaded(checkpoints) == (2, 2, None)


def test_a_step_saved_again_is_the_latest(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    save_metrics(checkpoints, [None] * 3)
    checkpoints.save(2, number=Number(20))
    assert checkpoints.steps == [1, 3, 2]
    assert loaded(checkpoints) == (2, 20, None)


def test_load_returns_none_without_checkpoints_and_names_a_missing_step(tmp_path):
    checkpoints = open_checkpoints(tmp_path / "a")
    assert loaded(checkpoints) is None
    assert checkpoints.latest is None
    save_metrics(checkpoints, [None])
    with pytest.raises(CheckpointError, match=r"a step that is kept: 1\nfound:    7"):
        loaded(checkpoints, 7)


def test_manifests_that_have_not_changed_are_read_once(tmp_path, monkeypatch):
    checkpoints, read = open_checkpoints(tmp_path), []
    monkeypatch.setattr(
        checkpoint_series, "peek", lambda folder, header: read.append(folder.name) or peek(folder, header)
    )
    save_metrics(checkpoints, [None] * 4)
    assert checkpoints.steps == [1, 2, 3, 4]
    assert sorted(read) == ["step-1", "step-2", "step-3", "step-4"]
    checkpoints.save(2, number=Number(2))
    assert checkpoints.steps == [1, 3, 4, 2]
    assert read[4:] == ["step-2"]


def test_other_things_in_the_folder_are_left_alone(tmp_path):
    for name in ("step-x", "step-01", "notes", "step-9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("ten years")
    checkpoints = open_checkpoints(tmp_path, keep_last=1)
    save_metrics(checkpoints, [None] * 3)
    assert checkpoints.steps == [3]
    assert sorted(os.listdir(tmp_path)) == ["notes", "step-01", "step-3", "step-9", "step-x"]


def test_a_damaged_latest_checkpoint_raises(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    save_metrics(checkpoints, [None] * 2)
    (tmp_path / "step-2" / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged: load another one"):
        loaded(checkpoints)
    assert loaded(checkpoints, 1) == (1, 1, None)


def test_a_renamed_checkpoint_keeps_the_step_of_its_manifest(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    save_metrics(checkpoints, [None] * 2)
    shutil.move(tmp_path / "step-2", tmp_path / "step-5")
    assert loaded(checkpoints) == (2, 2, None)


def test_load_returns_extra_with_the_step(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(3, metric=1, extra={"epoch": 1, "seen": torch.arange(2)}, thing=Holder({}))
    restored = checkpoints.load(thing=Holder())
    assert (restored.step, restored.metric, restored.extra["epoch"]) == (3, 1.0, 1)
    assert restored.extra["seen"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("retention", "what"),
    [({"keep_last": 0}, "keep_last of at least 1"), ({"keep_best": -1}, "keep_best of at least 0"),
     ({"keep_last": True}, "keep_last"), ({"mode": "least"}, "min, max")],
)  # fmt: skip
def test_invalid_retention_raises_at_once(tmp_path, retention, what):
    with pytest.raises(CheckpointError, match=what):
        open_checkpoints(tmp_path, **retention)


def test_invalid_steps_and_missing_metrics_raise(tmp_path):
    with pytest.raises(CheckpointError, match="a whole number"):
        open_checkpoints(tmp_path).save(-1, number=Number(1))
    with pytest.raises(CheckpointError, match="a metric to choose"):
        open_checkpoints(tmp_path, keep_best=1).save(1, number=Number(1))
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_kill_at_any_point_leaves_a_latest_that_loads_and_no_leftovers(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    save_metrics(open_checkpoints(tmp_path / "start", keep_last=2), [None] * 2)
    latest, points, finished = [], 1, False
    while not finished:
        folder = tmp_path / str(points)
        shutil.copytree(tmp_path / "start", folder)
        child = os.fork()
        if child == 0:
            Countdown(points).arm()
            open_checkpoints(folder, keep_last=2).save(3, number=Number(3))
            os._exit(0)
        finished = os.waitpid(child, 0)[1] == 0
        checkpoints = open_checkpoints(folder, keep_last=2)
        latest.append(loaded(checkpoints)[0])
        checkpoints.save(4, number=Number(4))
        assert loaded(checkpoints) == (4, 4, None)
        assert sorted(os.listdir(folder)) == [f"step-{latest[-1]}", "step-4"]
        points += 4
    assert latest == sorted(latest)
    assert set(latest) == {2, 3}
    assert len(latest) >= 25


def save_on_ranks(mesh, folder, layout, background):
    checkpoints = open_checkpoints(folder, mesh, keep_last=1, keep_best=1, layout=layout, background=background)
    save_metrics(checkpoints, [3.0, 1.0, 2.0])
    answer = loaded(checkpoints), loaded(checkpoints, "best")
    return answer, checkpoints.steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "background"), [(2, "sharded", True), (3, "whole", True), (3, "sharded", False)]
)
def test_every_rank_sees_the_same_checkpoints(tmp_path, ranks, layout, background):
    expected = (((3, 3, 2.0), (2, 2, 1.0)), [2, 3])
    assert on_mesh(ranks, save_on_ranks, tmp_path / "a", layout, background) == [expected] * ranks


def load_from_own(mesh, folder):
    try:
        return loaded(open_checkpoints(folder / str(mesh.rank), mesh))
    except CheckpointError as error:
        return str(error)


@pytest.mark.slow
def test_ranks_that_see_different_checkpoints_load_nothing(tmp_path):
    save_metrics(open_checkpoints(tmp_path / "0"), [None])
    for error in on_mesh(2, load_from_own, tmp_path):
        assert "none is there" in error
        assert "step 1 is there" in error


def test_an_invalid_position_in_a_manifest_raises(tmp_path):
    checkpoints = open_checkpoints(tmp_path, keep_last=1)
    save_metrics(checkpoints, [None])
    manifest = read_manifest(tmp_path / "step-1")
    for position in ({"order": 10**30, "step": 1}, {"order": -5, "step": -1}):
        data = msgspec.json.decode(encode_manifest(manifest)) | {"place": position}
        (tmp_path / "step-1" / "manifest.json").write_bytes(msgspec.json.encode(data))
        with pytest.raises(CheckpointError, match=r"checksum|manifest"):
            loaded(checkpoints)


@pytest.mark.slow
def test_the_public_functions_save_by_step_and_return_extra(tmp_path):
    model = torch.nn.Linear(2, 1)
    checkpoints = rankless.checkpoints(tmp_path / "a", keep_last=1, keep_best=1, mode="max", background=True)
    checkpoints.save(1, metric=0.5, model=model)
    assert checkpoints.load(model=model).step == 1
    rankless.save(tmp_path / "b", model=model, extra={"epoch": 2}, background=True)
    torch.manual_seed(3)
    assert rankless.load(tmp_path / "b", model=model, random=False) == {"epoch": 2}
    assert torch.initial_seed() == 3
