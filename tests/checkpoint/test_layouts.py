"""Whole and sharded checkpoints: which rank writes which file, and any number of ranks reads them."""

import json
import os

import pytest
import safetensors.torch
import torch
from checkpoint.saved_objects import SOLO, Holder, save
from support.processes import on_mesh
from torch import nn

from rankless.checkpoint import load
from rankless.checkpoint.manifest_io import read_manifest
from rankless.checkpoint.saving import assign_tensors
from rankless.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")


def make_trained(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 20), nn.Linear(20, 20))
    model[3].weight = nn.Parameter(model[2].weight.detach().new_ones(20, 20))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def flatten_state(value, path=""):
    """Every leaf of a state with its way, tensors as lists."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in flatten_state(item, f"{path}.{key}")]
    return [(path, value.tolist() if isinstance(value, torch.Tensor) else value)]


def states_of(objects):
    return [flatten_state(subject.state_dict()) for subject in objects.values()]


def save_trained(mesh, path, layout, background):
    save(path, make_trained(), mesh=mesh, layout=layout, background=background, extra={"epoch": 3})
    return sorted(os.listdir(path))


def load_trained(mesh, path):
    objects = make_trained(seed=1)
    loaded = load(path, objects, mesh=mesh)
    return states_of(objects), loaded.extra


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("ranks", "layout"), [(1, "sharded"), (2, "whole"), (2, "sharded"), (3, "sharded")])
@pytest.mark.ci_sample(3)
def test_any_number_of_ranks_loads_what_any_number_has_saved(tmp_path, ranks, layout, background):
    path = tmp_path / "c"
    arguments = (path, layout, background)
    names = save_trained(SOLO, *arguments) if ranks == 1 else on_mesh(ranks, save_trained, *arguments)[0]
    files = [f"tensors-{rank}.safetensors" for rank in range(ranks)] if layout == "sharded" else ["tensors.safetensors"]
    assert names == ["manifest.json", *files]
    expected = (states_of(make_trained()), {"epoch": 3})
    assert load_trained(SOLO, path) == expected
    for readers in (2, 3):
        assert on_mesh(readers, load_trained, path) == [expected] * readers
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.slow
def test_each_rank_of_a_sharded_save_writes_about_as_much(tmp_path):
    on_mesh(3, save_trained, tmp_path / "c", "sharded", False)
    files = [safetensors.torch.load_file(file) for file in (tmp_path / "c").glob("*.safetensors")]
    sizes = [sum(value.nbytes for name, value in file.items() if not name.startswith("random.")) for file in files]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) <= 30 * 20 * 4


def test_tensors_are_assigned_by_bytes_whatever_their_order():
    sizes = {"a": 100, "b": 60, "c": 50, "d": 0, "e": 1}
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    assert assign_tensors(tensors, [0, 0]) == [["a", "e", "d"], ["b", "c"]]
    assert assign_tensors(dict(reversed(tensors.items())), [0, 0]) == assign_tensors(tensors, [0, 0])
    assert assign_tensors({"a": torch.zeros(1)}, [0, 0, 0]) == [["a"], [], []]


def save_one_tensor(mesh, path):
    save(path, {"thing": Holder({"t": torch.arange(4)})}, mesh=mesh, layout="sharded")
    return sorted(os.listdir(path))


@pytest.mark.slow
def test_a_rank_that_holds_nothing_writes_no_file(tmp_path):
    assert on_mesh(3, save_one_tensor, tmp_path / "c") == [["manifest.json", "tensors-0.safetensors"]] * 3


def save_differing(mesh, path, what):
    shape = (2 + mesh.rank,) if what == "shape" else (2,)
    target = path / str(mesh.rank) if what == "path" else path
    layout = ("whole", "sharded")[mesh.rank] if what == "layout" else "sharded"
    try:
        save(target, {"thing": Holder({"t": torch.zeros(shape), "u": torch.zeros(shape)})}, mesh=mesh, layout=layout)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("what", ["shape", "path", "layout"])
def test_ranks_that_would_save_different_things_save_nothing(tmp_path, what):
    for error in on_mesh(2, save_differing, tmp_path / "c", what):
        assert "consistently" in error
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob(".*.new"))


@pytest.mark.slow
def test_a_sharded_save_by_hosts_that_share_no_folder_is_refused(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    errors = on_mesh(2, save_elsewhere, tmp_path)
    assert "the same for all ranks" in errors[1]
    assert 'layout="whole"' in errors[1]
    assert "rank 1 failed" in errors[0]


def save_elsewhere(mesh, path):
    """As on two hosts with disks of their own: the same name, another folder."""
    real = os.path.realpath
    link = path / "data"
    os.path.realpath = lambda name, **_: str(path / str(mesh.rank) / "c") if name == link else real(name)
    try:
        save(link, {"thing": Holder({"t": torch.zeros(2), "u": torch.zeros(2)})}, mesh=mesh, layout="sharded")
    except CheckpointError as error:
        return str(error)
    finally:
        os.path.realpath = real
    return None


@pytest.mark.slow
def test_a_file_without_wanted_tensors_is_not_read(tmp_path):
    on_mesh(2, save_one_each, tmp_path / "c")
    holders = {name: entry.name for entry in read_manifest(tmp_path / "c").files for name in entry.tensors}
    assert holders["large.t"] != holders["small.t"]
    (tmp_path / "c" / holders["small.t"]).write_bytes(b"spoilt")
    back = Holder()
    load(tmp_path / "c", {"large": back}, mesh=SOLO, random=holders["small.t"] != "tensors-0.safetensors")
    assert back.state["t"].tolist() == [1.0] * 100
    with pytest.raises(CheckpointError, match="bytes instead of"):
        load(tmp_path / "c", {"small": back}, mesh=SOLO)


def save_one_each(mesh, path):
    objects = {"large": Holder({"t": torch.ones(100)}), "small": Holder({"t": torch.ones(10)})}
    save(path, objects, mesh=mesh, layout="sharded")


def test_a_layout_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="whole, sharded"):
        save(tmp_path / "c", {}, layout="striped")


def test_the_manifest_is_json_that_any_program_reads(tmp_path):
    save(tmp_path / "c", {"model": nn.Linear(2, 1)}, extra={"lr": float("inf")})
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert manifest["format"] == "rankless checkpoint"
    assert manifest["version"] == 5
    assert [entry["name"] for entry in manifest["files"]] == ["tensors.safetensors"]
    assert "model.weight" in manifest["files"][0]["tensors"]
