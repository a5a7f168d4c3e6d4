"""The layout of a checkpoint folder, as typed data.

# Note [layout]: a checkpoint is a folder with `manifest.json` and the tensor files that it lists. A whole checkpoint
# has one, `tensors.safetensors`; a sharded one has `tensors-RANK.safetensors` for each rank that writes. A tensor is
# named by its path from the object's name, joined by dots: `model.conv.weight`, `optimizer.state.0.exp_avg`. A second
# tensor of the same name gets "#2". A tensor with several paths (tied weights) is in a file once, under the first
# path. So `safetensors.torch.load_file` alone reads all weights. In a sharded checkpoint, a tensor that is divided
# between ranks is in their files as pieces, whose names end in the rows: `model.conv.weight[4:8]`. The manifest holds
# the rest: the state of every object as a tree of typed nodes, in which a tensor is a reference. Nothing is pickled:
# any editor can read a manifest, and reading it runs no code. docs/guides/checkpoints.md describes it for other
# programs. Version 2 had no pieces, version 3 none of tensors that are divided along several dims, and version 4 no
layers of rows and no sparse tensors.

# Note [layers of rows]: tensors that have a row for each of some ids, as tables do, are in files of their own, called
# `rows-…`. The first file has all rows. A later one has the rows that have changed or are new since the earlier ones,
# and the ids whose rows are gone. So a save writes what has changed, and links the files of the checkpoint before.
# Read without the later ones, a file's tensors have the names of the whole ones.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Literal

import msgspec

FORMAT = "rankless checkpoint"
VERSION = 5
READABLE_VERSIONS = (2, 3, 4, 5)
MANIFEST_NAME = "manifest.json"
TENSORS_NAME = re.compile(r"(tensors(-(0|[1-9][0-9]{0,6}))?|rows-[0-9a-f]{32})\.safetensors")
"""The allowed names of a tensor file. None of them leads out of the folder."""


class SpecialFloat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="float"):
    """A float that JSON cannot write."""

    text: Literal["nan", "inf", "-inf"]


class Bytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="bytes"):
    """Bytes, in base64."""

    data: bytes


class NumpyScalar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="numpy"):
    """A numpy scalar: its dtype as numpy writes it (with byte order), and its bytes."""

    dtype: str
    data: bytes


class TensorReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="tensor"):
    """A tensor in a tensor file. `numpy` is the dtype of a numpy array, or None for a torch tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    numpy: str | None = None


class SparseReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="sparse"):
    """A sparse tensor in coordinate form, such as the momentum of sparse gradients, as two tensors."""

    indices: TensorReference
    values: TensorReference
    shape: tuple[int, ...]
    is_coalesced: bool


class Sequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="sequence"):
    """A list or a tuple."""

    type: Literal["list", "tuple"]
    items: "list[Node]"


class Mapping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="mapping"):
    """A dictionary, in its order. `metadata` is the `_metadata` that torch adds to a module's state."""

    type: Literal["dict", "ordered", "counter"]
    items: "list[tuple[int | str, Node]]"
    metadata: "Node" = None


Node = (
    None
    | bool
    | int
    | float
    | str
    | SpecialFloat
    | Bytes
    | NumpyScalar
    | TensorReference
    | SparseReference
    | Sequence
    | Mapping
)
"""One value of an object's state."""


def iterate_nodes(node: Node) -> Iterator[Node]:
    """Yield a node, and all nodes within it."""
    yield node
    within: list[Node] = []
    if isinstance(node, Sequence):
        within = node.items
    elif isinstance(node, Mapping):
        within = [*(item for _, item in node.items), node.metadata]
    elif isinstance(node, SparseReference):
        within = [node.indices, node.values]
    for item in within:
        yield from iterate_nodes(item)


class RowRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows from `start` to `stop` along `dim`."""

    dim: int
    start: int
    stop: int


class TensorPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows from `start` to `stop` along `dim` of the tensor called `tensor`, which as a whole has `shape`.

    `also` has those along other dims, if more than one dim is divided.
    """

    tensor: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    also: tuple[RowRange, ...] = ()

    @property
    def rows(self) -> tuple[RowRange, ...]:
        """The rows along the dims that are divided."""
        return (RowRange(self.dim, self.start, self.stop), *self.also)

    @property
    def box(self) -> tuple[slice, ...]:
        """The rows along every dim."""
        found = {item.dim: slice(item.start, item.stop) for item in self.rows}
        return tuple(found.get(dim, slice(0, size)) for dim, size in enumerate(self.shape))

    @property
    def name(self) -> str:
        """The piece's name in its file: the tensor's, and its rows as NumPy writes them."""
        texts = {item.dim: f"{item.start}:{item.stop}" for item in self.rows}
        return f"{self.tensor}[{', '.join(texts.get(dim, ':') for dim in range(max(texts) + 1))}]"

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of the piece."""
        return tuple(rows.stop - rows.start for rows in self.box)


class TensorFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor file of the folder: its name, its size, its SHA-256 and the names of its tensors.

    `pieces` describes, by name, those that are pieces of tensors.
    """

    name: str
    size_bytes: int
    sha256: str
    tensors: list[str]
    pieces: dict[str, TensorPiece] = msgspec.field(default_factory=dict)


class LayeredRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors with a row for each of some ids, in several files; see Note [layers of rows].

    `ids` is the name of the tensor of ids, in rising order, and `columns` are those of the tensors with a row for each.
    `layers` are the names of the files, from the first to the last.
    """

    ids: str
    columns: list[str]
    layers: list[str]

    @property
    def tensors(self) -> list[str]:
        """The names of all its tensors."""
        return [self.ids, *self.columns]

    @property
    def removed(self) -> str:
        """The name of the tensor with the ids that later files remove."""
        return f"{self.ids}#removed"


class SeriesPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position of a checkpoint in a training run.

    `order` grows by one with each save, whatever `step` is. `metric` is None if there is none.
    """

    order: int
    step: int
    metric: float | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint without its tensors. `sha256` is that of the file's bytes with nothing between its quotes.

    `random` holds one state for each rank, or one if all ranks had the same. `position`, which the file calls "place",
    is set for the checkpoints of a run.
    """

    format: str = FORMAT
    version: int = VERSION
    rankless: str
    position: SeriesPosition | None = msgspec.field(default=None, name="place")
    files: list[TensorFile]
    tables: list[LayeredRows] = []
    objects: dict[str, Node]
    extra: Node = None
    random: list[Node]
    sha256: str = ""


class Preamble(msgspec.Struct, frozen=True):
    """The fields of every version of the manifest, read first."""

    format: str
    version: int


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as the file's bytes, indented for people, with its checksum."""
    without_checksum = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(manifest, sha256="")), indent=1)
    return without_checksum.removesuffix(_checksum_line("")) + _checksum_line(
        hashlib.sha256(without_checksum).hexdigest()
    )


def has_valid_checksum(data: bytes, manifest: Manifest) -> bool:
    """Return whether a manifest's checksum is that of the bytes it was read from."""
    without_checksum = data.removesuffix(_checksum_line(manifest.sha256)) + _checksum_line("")
    return len(without_checksum) < len(data) and hashlib.sha256(without_checksum).hexdigest() == manifest.sha256


def _checksum_line(checksum: str) -> bytes:
    return f'"sha256": "{checksum}"\n}}'.encode()
