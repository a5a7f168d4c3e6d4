"""Full disks and folders without write permission: a clear error, and the old checkpoint is kept."""

import os
import subprocess
import warnings

import pytest
import torch
from checkpoint.saved_objects import Holder, Number, loaded_number, save
from support.processes import on_mesh

from rankless.checkpoint import Checkpoints, Retention, RunFunctions, SaveOptions, Saver
from rankless.errors import CheckpointError
from rankless.parallel.mesh import Mesh

SMALL_DISK_BYTES = 1 << 20


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES},mode=777", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        warnings.warn(f"no test on a full disk: {done.stderr.strip()}", stacklevel=1)
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def large(bytes_of_each, count=4):
    return Holder({f"t{number}": torch.ones(bytes_of_each, dtype=torch.uint8) for number in range(count)})


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_raises_and_the_old_checkpoint_is_kept(small_disk, background):
    save(small_disk / "c", {"number": Number(1)})
    for bytes_of_each in (SMALL_DISK_BYTES, SMALL_DISK_BYTES // 4):
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(small_disk / "c", {"number": Number(2), "large": large(bytes_of_each)}, background=background)
        assert loaded_number(small_disk / "c") == 1
        assert os.listdir(small_disk) == ["c"]
    save(small_disk / "c", {"number": Number(3)}, background=background)
    assert loaded_number(small_disk / "c") == 3


def save_too_much(mesh, path, background):
    saver = Saver(mesh=mesh)
    errors = []
    for size in (10, SMALL_DISK_BYTES // 3, 20):
        options = SaveOptions(layout="sharded", background=background, extra=size)
        try:
            saver.save(path, {"number": Number(size), "large": large(size)}, options=options)
            saver.wait()
            errors.append(None)
        except CheckpointError as error:
            errors.append(str(error))
            assert loaded_number(path, mesh) == 10
    return errors


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "background"), [(2, True), (3, False)])
def test_a_disk_that_fills_during_a_sharded_save_raises_on_every_rank(small_disk, ranks, background):
    answers = on_mesh(ranks, save_too_much, small_disk / "c", background)
    for first, second, third in answers:
        assert first is None
        assert "expected:" in second
        assert third is None
    assert any("No space left" in second for _, second, _ in answers)
    assert loaded_number(small_disk / "c") == 20


def test_a_disk_that_fills_keeps_the_checkpoints_of_a_run(small_disk):
    saver = Saver(mesh=Mesh.solo())
    retention, options = Retention(keep_last=1), SaveOptions()
    checkpoints = Checkpoints(
        small_disk / "a", retention=retention, options=options, run=RunFunctions(find_saver=lambda: saver, notify=print)
    )
    checkpoints.save(1, number=Number(1))
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints.save(2, large=large(SMALL_DISK_BYTES))
    assert checkpoints.steps == [1]


def test_a_folder_without_write_permission_raises(tmp_path):
    folder = tmp_path / "readonly"
    folder.mkdir()
    save(folder / "c", {"number": Number(1)})
    bound = subprocess.run(["mount", "--bind", "-o", "ro", str(folder), str(folder)], capture_output=True, text=True)
    if bound.returncode != 0:
        warnings.warn(f"no test on a read-only folder: {bound.stderr.strip()}", stacklevel=1)
        pytest.skip("a folder cannot be made read-only here (permissions do not bind root)")
    try:
        with pytest.raises(CheckpointError, match="Read-only file system"):
            save(folder / "c", {"number": Number(2)})
        assert loaded_number(folder / "c") == 1
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_an_impossible_path_raises(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"NotADirectoryError|FileExistsError"):
        save(tmp_path / "file" / "c", {"number": Number(1)})
    with pytest.raises(CheckpointError, match="the path of a checkpoint"):
        save("/", {"number": Number(1)})
    with pytest.raises(CheckpointError, match="File name too long"):
        save(tmp_path / ("x" * 300), {"number": Number(1)})
    assert os.listdir(tmp_path) == ["file"]
