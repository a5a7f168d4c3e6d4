"""A safetensors file that is written tensor by tensor, so that not all of them need to be in memory.

# Note [header first]: a safetensors file begins with the length of its header, and the header in JSON, which has the
# dtype, shape and place of each tensor. The elements follow without gaps. All of the header is known before the first
# element, so tensors can be written one at a time, in any order. safetensors itself writes only tensors that are all in
# memory. Tensors with larger elements come first: readers map the file, and need each at a multiple of its element.
#
# Note [views of other dtypes]: safetensors has no complex128, for example. Such a tensor is in the file as
# `torch.view_as_real` shows it, with a last dim of 2 for the real and the imaginary part, and small floats are there as
# bytes. The file's metadata names such tensors by dtype, for other programs: {"complex128": '["model.weight"]'}.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rankless.checkpoint.manifest import TensorFile, TensorPiece
from rankless.checkpoint.manifest_io import compute_checksum

ELEMENT_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""The dtypes that a safetensors file can hold, and its names for them."""
STORED_AS = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
}
"""The dtypes that it cannot hold, and those of their bytes there; see Note [views of other dtypes]."""
LENGTH_BYTES = 8
LARGEST_ELEMENT_BYTES = 16
"""That of complex128. PyTorch ends the process at some copies from memory at no multiple of the element."""


class TensorFileWriter:
    """Writes one tensor file; see Note [header first].

    Args:
        file: The path of the file, which does not exist yet.
        tensors: What it will hold, by name. Only dtypes and shapes are read.
        pieces: Those that are pieces of tensors, for the manifest.
    """

    def __init__(self, file: Path, tensors: Mapping[str, Tensor], pieces: Mapping[str, TensorPiece]) -> None:
        self._file = file
        self._pieces = dict(pieces)
        self._descriptor: int | None = None
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt", **list_views(tensors)}}
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
            start, end = end, end + tensor.nbytes
            self._offsets[name] = start
            code, shape = describe_stored(tensor.dtype, tensor.shape)
            header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
        encoded = msgspec.json.encode(header)
        encoded += b" " * (-(LENGTH_BYTES + len(encoded)) % LARGEST_ELEMENT_BYTES)
        self._header = len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded

    def write(self, name: str, tensor: Tensor, *, first_row: int = 0) -> None:
        """Write one tensor to its place, or the rows of it that begin with `first_row`."""
        descriptor = self._open()
        if tensor.nbytes:
            elements = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            data = elements.reshape(-1).view(torch.uint8).numpy().data
            skipped = first_row * (tensor.nbytes // len(tensor)) if first_row else 0
            write_all(descriptor, data, len(self._header) + self._offsets[name] + skipped)

    def finish(self) -> TensorFile:
        """Sync the file, and return its entry of the manifest, with the checksum of what is there."""
        os.fsync(self._open())
        self.close()
        with self._file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            return TensorFile(self._file.name, size, compute_checksum(stream), sorted(self._offsets), self._pieces)

    def close(self) -> None:
        """Close the file, finished or not."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            write_all(self._descriptor, memoryview(self._header), 0)
        return self._descriptor


def describe_stored(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """Return the name of the dtype that a tensor has in a file, and its shape there.

    Args:
        dtype: The dtype of the tensor.
        shape: Its shape.
    """
    return ELEMENT_CODES[STORED_AS.get(dtype, dtype)], [
        *shape,
        *([2] if dtype.is_complex and dtype in STORED_AS else []),
    ]


def restore_dtype(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of a file in its own dtype, in the same memory."""
    if dtype not in STORED_AS:
        return stored
    return torch.view_as_complex(stored) if dtype.is_complex else stored.view(dtype)


def list_views(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of the tensors of each dtype that a file cannot hold, by dtype, as JSON."""
    found: dict[str, list[str]] = {}
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype in STORED_AS:
            found.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(name)
    return {dtype: msgspec.json.encode(names).decode() for dtype, names in found.items()}


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write bytes at an offset of an open file. The system may write them in several parts."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
