"""Pieces of divided tensors: how they are written, and that any rows of them are read from any pieces."""

import itertools
import json

import pytest
import torch
from checkpoint.divided_tensors import divide, divide_model, load_into, make_saver, make_tensors, read_file
from checkpoint.saved_objects import SOLO, Holder, save
from support.processes import on_mesh
from torch import nn

from rankless.checkpoint import SaveOptions, load
from rankless.checkpoint.manifest_io import read_manifest
from rankless.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")


def save_divided(mesh, path, kind, options):
    """Save tensors that are divided along different dims, and one that is whole."""
    tensors = make_tensors()
    divided = {
        name: divide(mesh, tensor, number % max(1, tensor.dim()) if tensor.numel() else 0, kind)
        for number, (name, tensor) in enumerate(tensors.items())
    }
    saver = make_saver(mesh)
    saver.save(path, {"thing": Holder({**divided, "also": divided["matrix"], "own": torch.ones(3)})}, options=options)
    saver.wait()


def require_tensors(state):
    for name, wanted in make_tensors().items():
        assert type(state[name]) is torch.Tensor
        assert state[name].dtype == wanted.dtype
        assert torch.equal(state[name], wanted), name
    assert state["also"] is state["matrix"]


@pytest.mark.parametrize(
    ("ranks", "kind", "layout", "background"),
    [
        *((2, "even", "sharded", False), (3, "uneven", "sharded", True), (3, "last", "sharded", False)),
        *((2, "even", "whole", False), (3, "uneven", "whole", True)),
    ],
)
def test_pieces_of_every_dtype_and_stride_load_on_one_device(tmp_path, ranks, kind, layout, background):
    options = SaveOptions(layout=layout, background=background)
    on_mesh(ranks, save_divided, tmp_path / "c", kind, options)
    back = Holder()
    load(tmp_path / "c", {"thing": back}, mesh=SOLO)
    require_tensors(back.state)
    if layout == "whole":
        plain = read_file(tmp_path / "c" / "tensors.safetensors")
        assert all(torch.equal(plain[f"thing.{name}"], wanted) for name, wanted in make_tensors().items())


def test_a_whole_file_is_the_one_that_one_device_writes(tmp_path):
    on_mesh(2, save_divided, tmp_path / "divided", "even", SaveOptions())
    tensors = make_tensors()
    save(tmp_path / "plain", {"thing": Holder({**tensors, "also": tensors["matrix"], "own": torch.ones(3)})})
    ours, plain = (read_file(tmp_path / name / "tensors.safetensors") for name in ("divided", "plain"))
    kept = [name for name in plain if name.startswith("thing")]
    assert [name for name in ours if name.startswith("thing")] == kept
    assert all(torch.equal(ours[name], plain[name]) for name in kept)


def test_the_manifest_says_which_rows_a_piece_has(tmp_path):
    on_mesh(3, save_divided, tmp_path / "c", "even", SaveOptions(layout="sharded"))
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    wholes = {}
    for file in manifest["files"]:
        tensors = read_file(tmp_path / "c" / file["name"])
        assert sorted(tensors) == file["tensors"]
        for name, piece in file["pieces"].items():
            rows = (slice(None),) * piece["dim"] + (slice(piece["start"], piece["stop"]),)
            whole = wholes.setdefault(piece["tensor"], torch.empty(piece["shape"], dtype=tensors[name].dtype))
            whole[rows] = tensors[name]
    assert manifest["files"][1]["pieces"]["thing.turned[:, 2:4]"]["dim"] == 1
    wanted = {f"thing.{name}": tensor for name, tensor in make_tensors().items() if tensor.numel()}
    assert wholes.keys() >= wanted.keys()
    assert all(torch.equal(wholes[name], tensor) for name, tensor in wanted.items())


def read_all_divisions(mesh, path, model_kinds):
    """Load a model whose parameters are divided in several ways. Return whether each has the saved values."""
    found = []
    for kind in model_kinds:
        torch.manual_seed(1)
        model = divide_model(mesh, make_model(), kind)
        load_into(mesh, path, {"model": model})
        torch.manual_seed(0)
        wanted = make_model()
        pairs = list(zip(model.parameters(), wanted.parameters(), strict=True))
        pieces = [
            (one.partition.get_current_shard(), one.partition.layout.get_shard(two, mesh.rank)) for one, two in pairs
        ]
        found.append(all(torch.equal(one, two) for one, two in pieces))
        found.append(all(torch.equal(one, two) for one, two in pairs))
    return found


def make_model():
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5, 7), nn.Embedding(9, 2))


def save_model(mesh, path, kind, layout):
    torch.manual_seed(0)
    saver = make_saver(mesh)
    saver.save(path, {"model": divide_model(mesh, make_model(), kind)}, options=SaveOptions(layout=layout))


def test_any_rows_are_read_from_any_pieces(tmp_path):
    kinds = ("even", "uneven", "last")
    for ranks, kind in itertools.product((2, 3), kinds):
        on_mesh(ranks, save_model, tmp_path / f"{ranks}{kind}", kind, "sharded")
    for readers, path in itertools.product((1, 2, 4), sorted(tmp_path.iterdir())):
        if readers == 1:
            torch.manual_seed(1)
            model = make_model()
            load(path, {"model": model}, mesh=SOLO)
            torch.manual_seed(0)
            assert all(map(torch.equal, model.parameters(), make_model().parameters()))
        else:
            assert on_mesh(readers, read_all_divisions, path, kinds) == [[True] * 6] * readers


def save_changed(mesh, path, layout):
    """Save weights that the script has changed outside a job, and that it still holds; then load into them."""
    torch.manual_seed(0)
    model = divide_model(mesh, make_model())
    with torch.no_grad():
        model[2].weight.mul_(2)
        kept = model[2].weight.data
        kept[0, 0] = 7
    objects = {"model": model, "kept": Holder(model.state_dict()), "copy": Holder({"weight": kept})}
    make_saver(mesh).save(path, objects, options=SaveOptions(layout=layout))
    with torch.no_grad():
        model[2].weight.zero_()
    load_into(mesh, path, {"model": model})
    return kept.clone(), model[2].weight.detach().clone(), model[2].weight.partition.shard.detach().clone()


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_changes_outside_jobs_are_saved_and_views_see_what_is_loaded(tmp_path, layout):
    torch.manual_seed(0)
    wanted = make_model()[2].weight.detach() * 2
    wanted[0, 0] = 7
    for rank, (kept, weight, piece) in enumerate(on_mesh(2, save_changed, tmp_path / "c", layout)):
        assert torch.equal(kept, wanted)
        assert torch.equal(weight, wanted)
        assert torch.equal(piece, wanted.chunk(2, 1)[rank])
    kept, copied = Holder(), Holder()
    load(tmp_path / "c", {"kept": kept, "copy": copied}, mesh=SOLO)
    assert torch.equal(kept.state["2.weight"], wanted)
    assert torch.equal(copied.state["weight"], wanted)


def save_divided_unlike(mesh, path, layout):
    """Save tensors that the ranks divide in different ways."""
    whole = torch.ones(6, 4)
    layout_kind = ("even", "uneven")[mesh.rank]
    try:
        make_saver(mesh).save(path, {"thing": Holder({"t": divide(mesh, whole, 0, layout_kind)})}, options=layout)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_ranks_that_divide_in_different_ways_are_refused_and_do_not_hang(tmp_path, layout):
    for error in on_mesh(2, save_divided_unlike, tmp_path / "c", SaveOptions(layout=layout)):
        assert "1 of them divided" in error
    assert not list(tmp_path.iterdir())


def save_with_divided_extra(mesh, path, options):
    saver = make_saver(mesh)
    saver.save(path, {}, options=SaveOptions(**options, extra={"t": divide(mesh, torch.arange(6)), "epoch": mesh.rank}))
    saver.wait()


@pytest.mark.parametrize("options", [{}, {"layout": "sharded"}, {"background": True}], ids=str)
def test_a_divided_tensor_may_be_extra_data(tmp_path, options):
    on_mesh(2, save_with_divided_extra, tmp_path / "c", options)
    extra = load(tmp_path / "c", {}, mesh=SOLO).extra
    assert torch.equal(extra["t"], torch.arange(6))
    assert extra["epoch"] == 0


def save_while_saving(mesh, path):
    saver, found = make_saver(mesh), []
    for number in range(3):
        whole = torch.full((1000, 50), float(number))
        for layout in ("sharded", "whole"):
            options = SaveOptions(layout=layout, background=True)
            tensor = divide(mesh, whole)
            saver.save(path / layout, {"thing": Holder({"t": tensor})}, options=options)
            tensor.partition.shard.fill_(9)  # the copy that is being written must not change
    saver.wait()
    for layout in ("sharded", "whole"):
        back = Holder()
        load_into(mesh, path / layout, {"thing": back})
        found.append(bool((back.state["t"] == 2).all()))
    return found


def test_a_save_waits_for_the_one_before_and_copies_its_pieces(tmp_path):
    assert on_mesh(2, save_while_saving, tmp_path) == [[True, True]] * 2


def test_checkpoints_without_pieces_of_version_2_load(tmp_path):
    save(tmp_path / "c", {"thing": Holder({"t": torch.arange(5)})})
    manifest = read_manifest(tmp_path / "c")
    assert manifest.version == 5
    assert all(not entry.pieces for entry in manifest.files)
