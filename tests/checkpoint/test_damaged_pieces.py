"""Damaged, missing and contradictory pieces are refused before anything changes; failures leave the old checkpoint."""

import io
import os

import msgspec
import pytest
import torch
from checkpoint import killed_saves
from checkpoint.divided_tensors import divide_model, load_into, make_saver
from checkpoint.saved_objects import SOLO
from support.processes import on_mesh
from torch import nn

from rankless.checkpoint import SaveOptions, load, tensor_file_writer
from rankless.checkpoint.manifest_io import read_manifest, write_manifest
from rankless.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = "model.weight"


def make_model(value=1.0):
    model = nn.Linear(6, 4)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    return model


def save_model(mesh, path, value=1.0, options=None):
    saver = make_saver(mesh)
    saver.save(path, {"model": divide_model(mesh, make_model(value))}, options=options or SaveOptions(layout="sharded"))
    saver.wait()


@pytest.fixture
def saved(tmp_path):
    on_mesh(2, save_model, tmp_path / "c")
    return tmp_path / "c"


def refusal(path):
    """Return the error of a load that must change nothing."""
    model = make_model(5.0)
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError) as caught:
        load(path, {"model": model}, mesh=SOLO)
    assert all(bool((item == 5).all()) for item in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    return str(caught.value)


def test_a_flipped_bit_in_a_piece_is_refused(saved):
    file = saved / "tensors-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert "another checksum" in refusal(saved)


def test_a_missing_and_a_truncated_file_of_pieces_are_refused(saved):
    file = saved / "tensors-1.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    assert "bytes instead of" in refusal(saved)
    file.unlink()
    assert "FileNotFoundError" in refusal(saved)


def change_pieces(folder, *names, **changes):
    """Rewrite the manifest with other fields of some pieces, under the names that these give them."""
    manifest = read_manifest(folder)
    files = []
    for entry in manifest.files:
        pieces = dict(entry.pieces)
        for name in pieces.keys() & set(names):
            piece = msgspec.structs.replace(pieces.pop(name), **changes)
            pieces[piece.name] = piece
            listed = sorted([*(item for item in entry.tensors if item != name), piece.name])
            entry = msgspec.structs.replace(entry, pieces=pieces, tensors=listed)
        files.append(entry)
    write_manifest(folder, msgspec.structs.replace(manifest, files=files))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"start": 2}, "rows 2 to 3 of model.weight in two pieces"),
        ({"start": 4}, "rows 3 to 4 of model.weight missing"),
        ({"stop": 5}, "5 rows instead of 6"),
        ({"stop": 7}, "7 rows instead of 6"),
        ({"start": 3, "stop": 3}, "model.weight"),
        ({"start": -1}, "in two pieces"),
        ({"dim": 0}, "do not belong together"),
        ({"shape": (4, 7)}, "do not belong together"),
        ({"tensor": "model.other"}, "3 rows instead of 6"),
    ],
    ids=str,
)
def test_pieces_that_contradict_each_other_are_refused(saved, changes, found):
    change_pieces(saved, f"{NAME}[:, 3:6]", **changes)
    assert found in refusal(saved)


def test_pieces_of_another_shape_than_the_files_have_are_refused(saved):
    change_pieces(saved, f"{NAME}[:, 0:3]", f"{NAME}[:, 3:6]", shape=(5, 6))
    assert "for float32 (4, 6) in the manifest" in refusal(saved)


def test_a_tensor_that_is_whole_and_in_pieces_is_refused(saved):
    manifest = read_manifest(saved)
    first, *others = manifest.files
    first = msgspec.structs.replace(first, tensors=sorted([*first.tensors, NAME]))
    write_manifest(saved, msgspec.structs.replace(manifest, files=[first, *others]))
    assert "do not belong together" in refusal(saved)


def test_a_piece_that_its_file_does_not_have_is_refused(saved):
    manifest = read_manifest(saved)
    first, second = manifest.files
    second = msgspec.structs.replace(second, tensors=[])
    write_manifest(saved, msgspec.structs.replace(manifest, files=[first, second]))
    assert "does not have" in refusal(saved)


def test_a_checkpoint_of_version_2_loads(tmp_path):
    save_model(SOLO, tmp_path / "c", 3.0, SaveOptions())
    manifest = read_manifest(tmp_path / "c")
    tree = msgspec.to_builtins(msgspec.structs.replace(manifest, version=2, sha256=""))
    for entry in tree["files"]:
        del entry["pieces"]
    text = msgspec.json.format(msgspec.json.encode(tree), indent=1)
    seal = tensor_file_writer.compute_checksum(io.BytesIO(text))
    (tmp_path / "c" / "manifest.json").write_bytes(text.replace(b'"sha256": ""', f'"sha256": "{seal}"'.encode()))
    model = make_model(5.0)
    load(tmp_path / "c", {"model": model}, mesh=SOLO)
    assert bool((model.weight == 3).all())


def load_damaged(mesh, path):
    """Load with divided states what is damaged. Return the error and whether the states are as they were."""
    model = divide_model(mesh, make_model(5.0))
    try:
        load_into(mesh, path, {"model": model})
    except CheckpointError as error:
        return str(error), bool((model.weight == 5).all())
    return None


def test_divided_states_stay_as_they_are_when_a_load_fails(saved):
    (saved / "tensors-1.safetensors").write_bytes(b"no")
    for error, untouched in on_mesh(2, load_damaged, saved):
        assert "bytes instead of" in error
        assert untouched


def save_on_a_full_disk(mesh, path, options, failing_rank):
    """Save while the disk of one rank is full, and then again. Return the error of the first."""
    real, error_text = tensor_file_writer.write_all, None

    def write_all(descriptor, data, offset):
        if offset and mesh.rank == failing_rank:
            raise OSError(28, "No space left on device")
        real(descriptor, data, offset)

    tensor_file_writer.write_all = write_all
    try:
        save_model(mesh, path, 2.0, options)
    except CheckpointError as error:
        error_text = str(error)
    finally:
        tensor_file_writer.write_all = real
    back = make_model()
    load(path, {"model": back}, mesh=mesh)
    kept = bool((back.weight == 1).all())
    save_model(mesh, path, 3.0, options)
    return error_text, kept


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("layout", "failing_rank"), [("whole", 0), ("sharded", 0), ("sharded", 1)])
def test_a_full_disk_keeps_the_old_checkpoint_and_no_rank_waits(saved, layout, failing_rank, background):
    options = SaveOptions(layout=layout, background=background)
    for error, kept in on_mesh(2, save_on_a_full_disk, saved, options, failing_rank):
        assert "No space left" in error or "failed" in error
        assert kept
    model = make_model(5.0)
    load(saved, {"model": model}, mesh=SOLO)
    assert bool((model.weight == 3).all())
    assert os.listdir(saved.parent) == ["c"]


def save_new(path, _objects, *, mesh, **options):
    save_model(mesh, path, 2.0, SaveOptions(**options))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "killed_rank"), [("whole", 0), ("whole", 1), ("sharded", 0), ("sharded", 1)])
def test_a_kill_during_a_save_of_pieces_leaves_the_old_or_the_new_checkpoint(tmp_path, layout, killed_rank):
    found = set()
    for points in range(1, 400, 9):
        path = tmp_path / "c"
        on_mesh(2, save_model, path)
        how = {"ranks": 2, "killed_rank": killed_rank, "layout": layout, "save_with": save_new}
        survived = killed_saves.save_until_killed(path, {}, points=points, **how)
        model = make_model(5.0)
        load(path, {"model": model}, mesh=SOLO)
        values = {float(item) for parameter in model.parameters() for item in parameter.detach().flatten()}
        assert values in ({1.0}, {2.0})
        found |= values
        if survived:
            break
    assert 2.0 in found
    assert survived
