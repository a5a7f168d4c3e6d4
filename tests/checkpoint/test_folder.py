"""The checkpoint folder: replaced at once, never over other files, and checked when it is read."""

import os
from pathlib import Path

import msgspec
import pytest
from checkpoint.saved_objects import Number, loaded_number, save

from rankless.checkpoint import folder_commit
from rankless.checkpoint.folder_commit import UncommittedCheckpoint
from rankless.checkpoint.manifest import TensorFile, encode_manifest
from rankless.checkpoint.manifest_io import read_manifest
from rankless.errors import CheckpointError


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        loaded_number(path)
    return str(caught.value)


def test_an_old_checkpoint_is_replaced_whole(tmp_path):
    save(tmp_path / "c", {"number": Number(1), "other": Number(5)})
    save(tmp_path / "c", {"number": Number(2)})
    assert loaded_number(tmp_path / "c") == 2
    assert sorted(os.listdir(tmp_path / "c")) == ["manifest.json", "tensors.safetensors"]
    assert os.listdir(tmp_path) == ["c"]


def test_a_link_to_a_checkpoint_stays_a_link(tmp_path):
    (tmp_path / "runs" / "7").mkdir(parents=True)
    (tmp_path / "latest").symlink_to("runs/7")
    save(tmp_path / "latest", {"number": Number(1)})
    save(tmp_path / "latest", {"number": Number(2)})
    assert (tmp_path / "latest").is_symlink()
    assert loaded_number(tmp_path / "runs" / "7") == 2


def test_a_save_that_fails_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    save(tmp_path / "c", {"number": Number(1)})

    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path / "c", {"number": Number(2)})
    assert os.listdir(tmp_path) == ["c"]
    assert loaded_number(tmp_path / "c") == 1


def test_a_rank_whose_folder_vanishes_names_rank_0_and_leaves_nothing(tmp_path):
    ours, theirs = UncommittedCheckpoint(tmp_path / "c"), UncommittedCheckpoint(tmp_path / "c")
    ours.open("a token")
    theirs.reserve(1, "a token")
    ours.discard()
    for again in (False, True):
        if again:  # rank 1 wrote while rank 0 removed
            (tmp_path / ".c.new").mkdir()
            (tmp_path / ".c.new" / "tensors-1.safetensors").write_text("")
        with pytest.raises(CheckpointError, match="rank 0 to write its part"):
            theirs.report_written(1, TensorFile("tensors-1.safetensors", 0, "", []))
        with pytest.raises(CheckpointError, match="rank 0 to write its part"):
            theirs.report_failure(1, because=FileNotFoundError())
        assert os.listdir(tmp_path) == []


def test_other_files_are_not_replaced(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").write_text("ten years")
    with pytest.raises(CheckpointError, match=r"a folder with thesis\.txt"):
        save(tmp_path / "c", {"number": Number(1)})
    assert (tmp_path / "c" / "thesis.txt").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="a file"):
        save(tmp_path / "file", {"number": Number(1)})


@pytest.mark.parametrize("name", ["manifest.json", "tensors.safetensors"])
def test_every_truncated_or_altered_file_is_noticed(tmp_path, name):
    save(tmp_path / "c", {"number": Number(1)})
    file = tmp_path / "c" / name
    whole = file.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert "expected:" in refusal(tmp_path / "c")
    for position in range(0, len(whole), max(1, len(whole) // 97)):
        altered = bytearray(whole)
        altered[position] ^= 0x01
        file.write_bytes(bytes(altered))
        assert "expected:" in refusal(tmp_path / "c"), f"byte {position} was altered and no error was raised"
    file.unlink()
    assert name in refusal(tmp_path / "c")


def test_folders_that_are_not_checkpoints_raise(tmp_path):
    assert "nothing there" in refusal(tmp_path / "c")
    (tmp_path / "c").mkdir()
    assert "without manifest.json" in refusal(tmp_path / "c")
    (tmp_path / "c" / "manifest.json").write_text('{"format": "apk", "version": 1}')
    assert "format 'apk'" in refusal(tmp_path / "c")


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    save(tmp_path / "c", {"number": Number(1)})
    manifest = read_manifest(tmp_path / "c")
    later = msgspec.structs.replace(manifest, version=6)
    (tmp_path / "c" / "manifest.json").write_bytes(encode_manifest(later))
    assert "found:    version 6" in refusal(tmp_path / "c")


def test_everything_is_on_disk_before_the_commit_and_the_manifest_is_written_last(tmp_path, monkeypatch):
    events = []
    sync, rename, write = os.fsync, Path.rename, Path.write_bytes

    def note_sync(descriptor):
        events.append(("on disk", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        sync(descriptor)

    def note_rename(path, target):
        events.append(("renamed", Path(target).name))
        return rename(path, target)

    def note_write(path, data):
        events.append(("written", path.name))
        return write(path, data)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    monkeypatch.setattr(Path, "write_bytes", note_write)
    save(tmp_path / "c", {"number": Number(1)})
    assert events == [
        ("on disk", "tensors.safetensors"),
        ("written", "manifest.json"),
        ("on disk", "manifest.json"),
        ("on disk", ".c.new"),
        ("renamed", "c"),
        ("on disk", tmp_path.name),
    ]


def test_rank_0_waits_for_a_file_while_it_grows_and_then_raises(tmp_path, monkeypatch):
    uncommitted = UncommittedCheckpoint(tmp_path / "c")
    uncommitted.open("token")
    uncommitted.reserve(1, "token")
    monkeypatch.setattr(folder_commit, "STALL_TIMEOUT_SECONDS", 0.05)
    with pytest.raises(CheckpointError, match=r"rank 1 to write its part[\s\S]*no file has grown"):
        uncommitted.collect_files([1])
    uncommitted.report_failure(1, because=OSError())
    with pytest.raises(CheckpointError, match="it failed"):
        uncommitted.collect_files([1])
    with pytest.raises(CheckpointError, match="the same for all ranks"):
        uncommitted.reserve(1, "another token")


def test_rank_0_waits_for_a_late_file(tmp_path, monkeypatch):
    uncommitted, looks = UncommittedCheckpoint(tmp_path / "c"), []
    uncommitted.open("token")
    uncommitted.reserve(1, "token")
    part = TensorFile("tensors-1.safetensors", 1, "", [])

    def look(_seconds):
        looks.append(1)
        if len(looks) == 3:
            uncommitted.report_written(1, part)

    monkeypatch.setattr(folder_commit.time, "sleep", look)
    assert uncommitted.collect_files([1]) == [part]
    assert len(looks) == 3
    assert list(uncommitted.folder.iterdir()) == []
