import os
import shutil
import signal
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch

from rankless.checkpoint import load, save
from rankless.checkpoint.folder import read_manifest
from rankless.checkpoint.manifest import seal
from rankless.collectives.mesh import Mesh
from rankless.errors import CheckpointError

SOLO = Mesh.solo()


class Number:
    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "tensor": torch.full((1000,), float(self.value))}

    def load_state_dict(self, state):
        assert torch.equal(state["tensor"], torch.full((1000,), float(state["value"])))
        self.value = state["value"]


def loaded(path):
    number = Number()
    load(path, {"number": number}, mesh=SOLO)
    return number.value


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        loaded(path)
    return str(caught.value)


def save_until_killed(path, countdown):
    """Save in a forked child that kills itself at the n-th call that changes the disk; whether it came through."""
    child = os.fork()
    if child == 0:
        calls = iter(range(countdown - 1))

        def deadly(function):
            def counted(*arguments, **options):
                if next(calls, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return counted

        for name in ("mkdir", "rename", "write_bytes"):
            setattr(Path, name, deadly(getattr(Path, name)))
        safetensors.torch.save_file = deadly(safetensors.torch.save_file)
        shutil.rmtree = deadly(shutil.rmtree)
        os.fsync = deadly(os.fsync)
        try:
            save(path, {"number": Number(2)}, mesh=SOLO)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


def test_a_kill_at_any_point_leaves_the_old_or_the_new_checkpoint(tmp_path):
    outcomes = []
    for countdown in range(1, 30):
        path = tmp_path / str(countdown) / "c"
        save(path, {"number": Number(1)}, mesh=SOLO)
        finished = save_until_killed(path, countdown)
        outcomes.append(loaded(path))
        save(path, {"number": Number(3)}, mesh=SOLO)
        assert loaded(path) == 3
        assert os.listdir(path.parent) == ["c"]
        if finished:
            break
    assert finished
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, 2}
    assert len(outcomes) > 9


def test_an_old_checkpoint_is_replaced_whole(tmp_path):
    save(tmp_path / "c", {"number": Number(1), "other": Number(5)}, mesh=SOLO)
    save(tmp_path / "c", {"number": Number(2)}, mesh=SOLO)
    assert loaded(tmp_path / "c") == 2
    assert sorted(os.listdir(tmp_path / "c")) == ["manifest.json", "tensors.safetensors"]
    assert os.listdir(tmp_path) == ["c"]


def test_a_link_to_a_checkpoint_stays_a_link(tmp_path):
    (tmp_path / "runs" / "7").mkdir(parents=True)
    (tmp_path / "latest").symlink_to("runs/7")
    save(tmp_path / "latest", {"number": Number(1)}, mesh=SOLO)
    save(tmp_path / "latest", {"number": Number(2)}, mesh=SOLO)
    assert (tmp_path / "latest").is_symlink()
    assert loaded(tmp_path / "runs" / "7") == 2


def test_a_save_that_fails_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    save(tmp_path / "c", {"number": Number(1)}, mesh=SOLO)

    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path / "c", {"number": Number(2)}, mesh=SOLO)
    assert os.listdir(tmp_path) == ["c"]
    assert loaded(tmp_path / "c") == 1


def test_other_peoples_files_are_not_replaced(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").write_text("ten years")
    with pytest.raises(CheckpointError, match=r"a folder with thesis\.txt"):
        save(tmp_path / "c", {"number": Number(1)}, mesh=SOLO)
    assert (tmp_path / "c" / "thesis.txt").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="a file"):
        save(tmp_path / "file", {"number": Number(1)}, mesh=SOLO)


@pytest.mark.parametrize("name", ["manifest.json", "tensors.safetensors"])
def test_every_truncated_or_altered_file_is_noticed(tmp_path, name):
    save(tmp_path / "c", {"number": Number(1)}, mesh=SOLO)
    file = tmp_path / "c" / name
    whole = file.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert "expected:" in refusal(tmp_path / "c")
    for place in range(0, len(whole), max(1, len(whole) // 97)):
        altered = bytearray(whole)
        altered[place] ^= 0x01
        file.write_bytes(bytes(altered))
        try:
            found = loaded(tmp_path / "c")
        except CheckpointError:
            continue
        assert name == "manifest.json"
        assert whole[place : place + 1].isspace(), f"byte {place} was altered and nobody noticed"
        assert found == 1
    file.unlink()
    assert name in refusal(tmp_path / "c")


def test_folders_that_are_no_checkpoint_are_named_as_such(tmp_path):
    assert "nothing there" in refusal(tmp_path / "c")
    (tmp_path / "c").mkdir()
    assert "without manifest.json" in refusal(tmp_path / "c")
    (tmp_path / "c" / "manifest.json").write_text('{"format": "apk", "version": 1}')
    assert "format 'apk'" in refusal(tmp_path / "c")


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    save(tmp_path / "c", {"number": Number(1)}, mesh=SOLO)
    manifest = read_manifest(tmp_path / "c")
    later = msgspec.structs.replace(manifest, version=2)
    (tmp_path / "c" / "manifest.json").write_bytes(seal(later))
    assert "version 2" in refusal(tmp_path / "c")
