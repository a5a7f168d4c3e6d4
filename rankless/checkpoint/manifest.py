"""The layout of a checkpoint's folder, as typed data.

# Note [layout]: a checkpoint is a folder with `manifest.json` and the tensor files it lists: one,
# `tensors.safetensors`, if it was saved whole; one for each rank that holds something, `tensors-RANK.safetensors`,
# if sharded. A tensor is named by its way from the object's name to it, joined by dots: `model.conv.weight`,
# `optimizer.state.0.exp_avg`; a second tensor of the same name gets "#2". A tensor that several ways lead to (tied
# weights) lies in a file once, under the first of them. So `safetensors.torch.load_file` alone gives all weights. The
# manifest holds the rest: for every object its state as a tree of typed nodes, in which a tensor is a reference.
# Nothing is pickled: a manifest can be read in any editor, and reading it runs no code. docs/guides/checkpoints.md
# describes it for other programs.
"""

import hashlib
import re
from typing import Literal

import msgspec

FORMAT = "rankless checkpoint"
VERSION = 2
MANIFEST_NAME = "manifest.json"
TENSORS_NAME = re.compile(r"tensors(-(0|[1-9][0-9]{0,6}))?\.safetensors")
"""What a tensor file may be called: nothing that leads out of the folder."""


class SpecialFloat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="float"):
    """A float that JSON has no word for."""

    text: Literal["nan", "inf", "-inf"]


class Bytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="bytes"):
    """Bytes, in base64."""

    data: bytes


class NumpyScalar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="numpy"):
    """A numpy scalar: its dtype as numpy spells it (with byte order) and its bytes."""

    dtype: str
    data: bytes


class TensorReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="tensor"):
    """A tensor in a tensor file. `numpy` is the dtype of a numpy array, or None for a torch tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    numpy: str | None = None


class Sequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="sequence"):
    """A list or a tuple."""

    type: Literal["list", "tuple"]
    items: "list[Node]"


class Mapping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="mapping"):
    """A dictionary, in its order. `metadata` is the `_metadata` that torch hangs on a module's state."""

    type: Literal["dict", "ordered", "counter"]
    items: "list[tuple[int | str, Node]]"
    metadata: "Node" = None


Node = None | bool | int | float | str | SpecialFloat | Bytes | NumpyScalar | TensorReference | Sequence | Mapping
"""One value of an object's state."""


class TensorFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor file of the folder, its size, the SHA-256 of its bytes and the names of all tensors in it."""

    name: str
    size_bytes: int
    sha256: str
    tensors: list[str]


class HistoryPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a checkpoint stands in a series of them.

    `order` grows by one from save to save, whatever `step` says; `metric` is None where there is none.
    """

    order: int
    step: int
    metric: float | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a checkpoint but the tensors. `sha256` is that of the file's bytes with nothing between its quotes.

    `random` holds one state for each rank, or one alone if all ranks had the same; `place` is set in a series.
    """

    format: str = FORMAT
    version: int = VERSION
    rankless: str
    position: HistoryPosition | None = msgspec.field(default=None, name="place")
    files: list[TensorFile]
    objects: dict[str, Node]
    extra: Node = None
    random: list[Node]
    sha256: str = ""


class Preamble(msgspec.Struct, frozen=True):
    """What every version of the manifest has, read first."""

    format: str
    version: int


def encode_manifest(manifest: Manifest) -> bytes:
    """A manifest as the file's bytes, indented for people, with its checksum."""
    without_checksum = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(manifest, sha256="")), indent=1)
    return without_checksum.removesuffix(_checksum_line("")) + _checksum_line(
        hashlib.sha256(without_checksum).hexdigest()
    )


def has_valid_checksum(data: bytes, manifest: Manifest) -> bool:
    """Whether a manifest's checksum is that of the bytes it was read from."""
    without_checksum = data.removesuffix(_checksum_line(manifest.sha256)) + _checksum_line("")
    return len(without_checksum) < len(data) and hashlib.sha256(without_checksum).hexdigest() == manifest.sha256


def _checksum_line(checksum: str) -> bytes:
    return f'"sha256": "{checksum}"\n}}'.encode()
