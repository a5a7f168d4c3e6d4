"""Pieces of tensors that two axes divide: boxes of elements, which load into any other division."""

import io
import itertools

import msgspec
import pytest
import torch
from checkpoint.divided_tensors import make_tensors, read_file
from checkpoint.saved_objects import SOLO, Holder, save
from support.processes import on_mesh
from support.two_axes import make_two_axes

from rankless.checkpoint import SaveOptions, Saver, load, tensor_file_writer
from rankless.checkpoint.manifest import RowRange
from rankless.checkpoint.manifest_io import read_manifest, write_manifest
from rankless.errors import CheckpointError
from rankless.ownership.partitioned_tensor import Partition, WholeValues, make_partitioned_tensor
from rankless.ownership.shard_layout import ShardLayout
from rankless.ownership.sharded_state_owner import ShardedStateOwner
from rankless.parallel.tensor_placement import BlockedShard, Shard

pytestmark = pytest.mark.usefixtures("one_thread")
OUTER = {
    "even": lambda size: split(size, 2),
    "uneven": lambda size: (size - 1, 1),
    "first": lambda size: (size, 0),
}


def split(size, count):
    return tuple((size + count - 1 - rank) // count for rank in range(count))


def divide_twice(mesh, whole, dims, kind):
    """Return a tensor divided along the inner axis, and its piece along the axis data."""
    data, inner = mesh.axes
    size = whole.shape[dims[0]]
    placement = Shard(dims[0], OUTER["even" if kind == "blocks" else kind](size))
    if kind == "blocks" and size % 2 == 0:
        placement = BlockedShard(dims[0], split(size // 2, 2))
    layout = ShardLayout.of(whole, placement)
    piece = layout.copy_shard(whole, inner.rank)
    rows = piece.shape[dims[1]]
    within = ShardLayout.of(piece, Shard(dims[1], split(rows, 2)))
    values = [WholeValues(axis, lambda _operation: None) for axis in (inner, data)]
    own = within.copy_shard(piece, data.rank)
    held = make_partitioned_tensor(Partition(within, own, "piece", values[1], device=whole.device))
    return make_partitioned_tensor(Partition(layout, held, "tensor", values[0], device=whole.device))


def divide_all(mesh, kind, order):
    found = {}
    for number, (name, tensor) in enumerate(make_tensors().items()):
        dims = tuple((number * order + place) % tensor.dim() for place in (0, order))
        found[name] = divide_twice(mesh, tensor, dims, kind) if tensor.numel() else tensor
    return found


def make_saver(mesh):
    data, inner = mesh.axes
    owner = ShardedStateOwner(inner, lambda _: None, within=ShardedStateOwner(data, lambda _: None))
    return Saver(mesh=mesh, owner=owner)


def save_boxes(mesh, path, kind, order, layout="sharded"):
    mesh = make_two_axes(mesh)
    saver = make_saver(mesh)
    saver.save(path, {"thing": Holder(divide_all(mesh, kind, order))}, options=SaveOptions(layout=layout))
    saver.wait()


def require_tensors(state):
    for name, wanted in make_tensors().items():
        assert torch.equal(state[name], wanted), name


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("layout", ["sharded", "whole"])
def test_boxes_of_every_dtype_and_stride_load_on_one_device(tmp_path, layout):
    for kind, order in itertools.product((*OUTER, "blocks"), (1, 2)):
        on_mesh(4, save_boxes, tmp_path / f"{kind}{order}", kind, order, layout)
        back = Holder()
        load(tmp_path / f"{kind}{order}", {"thing": back}, mesh=SOLO)
        require_tensors(back.state)


def test_the_manifest_says_which_elements_a_box_has(tmp_path):
    on_mesh(4, save_boxes, tmp_path / "c", "blocks", 1)
    manifest = msgspec.json.decode((tmp_path / "c" / "manifest.json").read_bytes())
    wholes = {}
    for file in manifest["files"]:
        for name, value in read_file(tmp_path / "c" / file["name"]).items():
            piece = file["pieces"].get(name)
            if piece is not None:
                whole = wholes.setdefault(piece["tensor"], torch.empty(piece["shape"], dtype=value.dtype))
                for rows in (piece, *piece["also"]):
                    whole = whole.narrow(rows["dim"], rows["start"], rows["stop"] - rows["start"])
                whole.copy_(value)
    assert "thing.matrix[0:4, 0:3]" in manifest["files"][0]["pieces"]
    wanted = {f"thing.{name}": tensor for name, tensor in make_tensors().items() if tensor.numel()}
    assert wholes.keys() == wanted.keys()
    assert all(torch.equal(wholes[name], tensor) for name, tensor in wanted.items())


class Filled:
    """An object whose tensors get the values of a checkpoint in place."""

    def __init__(self, tensors):
        self.tensors = tensors

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        for name, tensor in self.tensors.items():
            tensor.copy_(state[name])


def load_boxes(mesh, path, kind, order):
    """Return whether each tensor, and this worker's box of it, has the saved values."""
    mesh = make_two_axes(mesh)
    wanted, tensors = divide_all(mesh, kind, order), divide_all(mesh, kind, order)
    for tensor in tensors.values():
        local = tensor.partition.shard.partition.shard if tensor.numel() else tensor
        local.zero_()
    load(path, {"thing": Filled(tensors)}, mesh=mesh, owner=make_saver(mesh).owner)
    boxes = [
        torch.equal(tensor.partition.get_current_shard(), wanted[name].partition.get_current_shard())
        for name, tensor in tensors.items()
        if tensor.numel()
    ]
    return all(boxes), all(torch.equal(tensor, make_tensors()[name]) for name, tensor in tensors.items())


def test_boxes_load_into_boxes_of_another_division(tmp_path):
    on_mesh(4, save_boxes, tmp_path / "boxes", "uneven", 1)
    save(tmp_path / "plain", {"thing": Holder(make_tensors())})
    for path, kind, order in itertools.product(("boxes", "plain"), (*OUTER, "blocks"), (1, 2)):
        assert on_mesh(4, load_boxes, tmp_path / path, kind, order) == [(True, True)] * 4


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    path = tmp_path_factory.mktemp("boxes") / "c"
    on_mesh(4, save_boxes, path, "even", 1)
    return path


def change_piece(path, target, name, **changes):
    """Copy a checkpoint, with other fields of one piece under the name that these give it."""
    manifest = read_manifest(path)
    files = []
    for entry in manifest.files:
        pieces = dict(entry.pieces)
        if name in pieces:
            piece = msgspec.structs.replace(pieces.pop(name), **changes)
            new = piece.name if all(0 <= rows.dim < 9 for rows in piece.rows) else name
            pieces[new] = piece
            listed = sorted([*(item for item in entry.tensors if item != name), new])
            entry = msgspec.structs.replace(entry, pieces=pieces, tensors=listed)
        files.append(entry)
    target.mkdir()
    write_manifest(target, msgspec.structs.replace(manifest, files=files))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"also": ()}, "do not belong together"),
        ({"also": (RowRange(1, 2, 5),)}, "rows 2 to 3 of thing.matrix in two pieces"),
        ({"also": (RowRange(1, 4, 5),)}, "rows 3 to 4 of thing.matrix missing"),
        ({"also": (RowRange(0, 3, 5),)}, "with rows along the dims [0, 0]"),
        ({"also": (RowRange(10**12, 3, 5),)}, "with rows along the dims [0, 1000000000000]"),
        ({"also": (RowRange(-1, 3, 5),)}, "with rows along the dims [0, -1]"),
        ({"start": 1}, "thing.matrix"),
        ({"stop": 5}, "thing.matrix"),
    ],
    ids=str,
)
def test_boxes_that_contradict_each_other_are_refused(tmp_path, boxes, changes, found):
    change_piece(boxes, tmp_path / "c", "thing.matrix[0:4, 3:5]", **changes)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path / "c")
    assert found in str(caught.value)


def test_a_checkpoint_of_version_3_loads(tmp_path):
    on_mesh(2, save_rows, tmp_path / "c")
    tree = msgspec.to_builtins(msgspec.structs.replace(read_manifest(tmp_path / "c"), version=3, sha256=""))
    pieces = [piece for entry in tree["files"] for piece in entry["pieces"].values()]
    assert len(pieces) == 2
    for piece in pieces:
        del piece["also"]
    text = msgspec.json.format(msgspec.json.encode(tree), indent=1)
    seal = tensor_file_writer.compute_checksum(io.BytesIO(text))
    (tmp_path / "c" / "manifest.json").write_bytes(text.replace(b'"sha256": ""', f'"sha256": "{seal}"'.encode()))
    back = Holder()
    load(tmp_path / "c", {"thing": back}, mesh=SOLO)
    assert torch.equal(back.state["matrix"], make_tensors()["matrix"])


def save_rows(mesh, path):
    whole = make_tensors()["matrix"]
    layout = ShardLayout.of(whole, Shard(0, (4, 3)))
    values = WholeValues(mesh.axes[0], lambda _: None)
    own = layout.copy_shard(whole, mesh.rank)
    tensor = make_partitioned_tensor(Partition(layout, own, "matrix", values, device=whole.device))
    saver = Saver(mesh=mesh, owner=ShardedStateOwner(mesh.axes[0], lambda _: None))
    saver.save(path, {"thing": Holder({"matrix": tensor})}, options=SaveOptions(layout="sharded"))
