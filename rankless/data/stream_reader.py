"""Reading a stream, an IterableDataset: in its own order, batch by batch, each rank keeping its own samples.

Note [the same stream]: a stream has no indices by which a rank could read its part, so every rank runs over it, in a
one-process DataLoader's order and with its random numbers, and collates its own rows only: what is dear belongs into
`collate_fn`. That is right if every rank is given the same samples; a queue or a socket gives each rank others. So the
ranks compare a digest of what each batch is made of. A stream that cannot be read by every rank is read by the first.
"""

import zlib
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from rankless.data.batch_tree import iterate_leaves
from rankless.data.sample_reader import BatchRequest, ReadFailure, SamplesRead, report_read_failure
from rankless.parallel.placement import split_lengths

_COMPARED_BYTES = 1 << 16


class StreamReader(IterableDataset[Any]):
    """The user's stream as DataLoader sees it: one item is what a whole batch is made of.

    `batch_size` None takes what the stream gives for whole batches.
    """

    def __init__(self, dataset: Any, *, batch_size: int | None, drop_last: bool, part: tuple[int, int] | None) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.part = part
        """This rank and the number of ranks, where each collates its own rows; None where it collates all."""

    def __iter__(self) -> Iterator[SamplesRead | ReadFailure]:
        # Not inside the generator below: DataLoader calls the user's __iter__ when an iteration begins.
        return self._batches(iter(self.dataset))

    def _batches(self, stream: Iterator[Any]) -> Iterator[SamplesRead | ReadFailure]:
        position, wanted = 0, 1 if self.batch_size is None else self.batch_size
        while True:
            samples: list[Any] = []
            try:
                for sample in islice(stream, wanted):
                    samples.append(sample)
            except Exception as error:  # a stream is foreign code; its error is given the sample's place
                info = get_worker_info()
                reader = "" if info is None else f", as reader process {info.id} of {info.num_workers} has it"
                yield report_read_failure(error, f"sample {position + len(samples)} of the stream, from 0{reader}")
                return
            if not samples or (self.drop_last and len(samples) < wanted):
                return
            yield self._of_samples(samples, position)
            position += len(samples)
            if len(samples) < wanted:
                return

    def _of_samples(self, samples: list[Any], position: int) -> SamplesRead:
        digest = compute_digest(samples)
        if self.batch_size is None:
            whole = BatchRequest(indices=[position], rows=None, is_split=False, digest=digest)
            return SamplesRead(request=whole, batch=samples[0])
        rows = len(samples)
        indices: range = range(position, position + rows)
        is_split = self.part is not None and rows >= self.part[1]
        if is_split and self.part is not None:
            rank, size = self.part
            lengths = split_lengths(rows, size)
            own = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
            samples, indices = samples[own], indices[own]
        request = BatchRequest(indices=indices, rows=rows, is_split=is_split, digest=digest)
        return SamplesRead(request=request, samples=samples)


def compute_digest(samples: Any) -> bytes:
    """A digest of what samples hold: numbers and texts whole, tensors and arrays up to 64 KiB whole, else in part."""
    digest = blake2b(digest_size=16)
    for path, leaf in iterate_leaves(samples, ""):
        digest.update(path.encode())
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {list(leaf.shape)} {_checksum(leaf)}".encode())
        elif isinstance(leaf, numpy.ndarray) and not leaf.dtype.hasobject:
            digest.update(f"{leaf.dtype} {leaf.shape} {_checksum_of_bytes(numpy.ascontiguousarray(leaf))}".encode())
        elif isinstance(leaf, str | bytes | int | float | complex | numpy.generic):
            digest.update(repr(leaf).encode())
        else:
            digest.update(type(leaf).__qualname__.encode())
    return digest.digest()


def _checksum(tensor: Tensor) -> int:
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return 0
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return _checksum_of_bytes(plain.reshape(-1).view(torch.uint8).numpy())


def _checksum_of_bytes(array: Any) -> int:
    data = memoryview(array).cast("B") if array.size else memoryview(b"")
    if len(data) <= _COMPARED_BYTES:
        return zlib.crc32(data)
    checksum, stride = 0, len(data) // 16
    for start in range(0, len(data), stride):
        checksum = zlib.crc32(data[start : start + _COMPARED_BYTES // 16], checksum)
    return checksum
