"""The layout of a checkpoint's folder, as typed data.

# Note [layout]: a checkpoint is a folder with `manifest.json` and the tensor files it lists: today one,
# `tensors.safetensors`, written by rank 0. A tensor is named by its way from the object's name to it,
# joined by dots: `model.conv.weight`, `optimizer.state.0.exp_avg`; a second tensor of the same name gets
# "#2". A tensor that several ways lead to (tied weights) lies in the file once, under the first of them. So
# `safetensors.torch.load_file` alone gives all weights. The manifest holds the rest: for every object its
# state as a tree of typed nodes, in which a tensor is a reference. Nothing is pickled: a manifest can be
# read in any editor, and reading it runs no code.
"""

import hashlib
from typing import Literal

import msgspec

FORMAT = "rankless checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
TENSORS_NAME = "tensors.safetensors"
RANDOM_STATE = "random"
"""The name under which the random state is kept; no object may have it."""


class SpecialFloat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="float"):
    """A float that JSON has no word for: "nan", "inf" or "-inf"."""

    text: str


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
    """A tensor file of the folder, its size and the SHA-256 of its bytes."""

    name: str
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a checkpoint but the tensors. `sha256` is that of the manifest itself with this field empty."""

    format: str = FORMAT
    version: int = VERSION
    rankless: str
    files: list[TensorFile]
    objects: dict[str, Node]
    sha256: str = ""


class Preamble(msgspec.Struct, frozen=True):
    """What every version of the manifest has, read first."""

    format: str
    version: int


def digest(manifest: Manifest) -> str:
    """The SHA-256 of a manifest, whatever its own `sha256` says."""
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(manifest, sha256=""))).hexdigest()


def seal(manifest: Manifest) -> bytes:
    """A manifest as the file's bytes, with its own checksum, indented for people."""
    sealed = msgspec.structs.replace(manifest, sha256=digest(manifest))
    return msgspec.json.format(msgspec.json.encode(sealed), indent=1)
