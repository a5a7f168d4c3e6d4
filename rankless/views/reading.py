"""Reading the samples of one batch: in the script's process, or in a loader's reader processes.

Note [a sample's random numbers]: in split reading no rank reads what another reads, so a data set that draws
from the running generators would give every rank other numbers than one device. Instead the generators are
seeded from (seed, epoch, index) before each sample and restored after the batch: the same augmentation on any
number of workers. The three numbers are mixed by SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014, with the constants of Vigna's reference code). CPU generators
only: data sets that draw on a GPU are not covered.
"""

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info

from rankless.errors import DataError

_MASK = (1 << 64) - 1


def split_mix_64(state: int) -> int:
    """64 well-mixed bits from 64 bits that may be close to others."""
    mixed = (state + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of an epoch; `epoch` counts from 0."""
    return split_mix_64(split_mix_64(seed & _MASK) ^ epoch)


def sample_seed(seed_of_epoch: int, index: object) -> int:
    """The seed of one sample: of an integer index by mixing, of any other key by a digest of its `repr`."""
    try:
        number = int(index)  # type: ignore[call-overload]  # whatever a sampler yields
    except (TypeError, ValueError):
        number = int.from_bytes(blake2b(repr(index).encode(), digest_size=8).digest(), "little")
    return split_mix_64(seed_of_epoch ^ (number & _MASK))


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """One batch as this rank reads it."""

    indices: Sequence[Any]
    rows: int
    """Of the whole batch, of all ranks."""
    divided: bool
    """Whether `indices` are this rank's part only."""
    digest: bytes
    """Of the whole batch's indices and the epoch's seed: equal on every rank, or the ranks have parted."""
    sample_seeds: Sequence[int] | None
    """One for each index, or None: read from the running generators."""


@dataclass(frozen=True, kw_only=True)
class BatchRead:
    """A batch collated, with the request that it answers."""

    data: Any
    request: BatchRequest


@dataclass(frozen=True, kw_only=True)
class ReadingFailure:
    """An error on its way from a reader process, where exceptions of unknown types do not travel well."""

    found: str
    fix: str
    where: str | None

    def as_error(self) -> DataError:
        """The error to raise in the script's process."""
        return DataError(
            expected="samples and batches that can be read", found=self.found, fix=self.fix, where=self.where
        )


@dataclass(frozen=True, kw_only=True)
class SamplesRead:
    """Samples on their way to collation; `columns` instead where they are read as whole tensors."""

    request: BatchRequest
    samples: Any = None
    columns: list[torch.Tensor] | None = None


class SampleReader(Dataset[Any]):
    """The user's data set as DataLoader sees it: asked for a `BatchRequest`, it gives the samples."""

    def __init__(self, dataset: Any, *, as_columns: bool) -> None:
        self.dataset = dataset
        self.as_columns = as_columns

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: BatchRequest) -> SamplesRead | ReadingFailure:
        """All samples of a request."""
        if self.as_columns:
            rows = torch.tensor(request.indices, dtype=torch.int64)
            columns = [tensor.index_select(0, rows) for tensor in self.dataset.tensors]
            return SamplesRead(request=request, columns=columns)
        place: list[Any] = []
        try:
            return SamplesRead(request=request, samples=self._read(request, place))
        except Exception as error:  # a data set is foreign code; its error is given the sample's name
            failure = _failure(error, place, request)
            if get_worker_info() is None:
                raise failure.as_error() from error
            return failure

    def _read(self, request: BatchRequest, place: list[Any]) -> Any:
        """The samples; `place` holds the index that is being read, for the sake of an error's text."""
        if request.sample_seeds is None:
            read_many = getattr(self.dataset, "__getitems__", None)
            if read_many:
                return read_many(list(request.indices))
            return [self._read_one(index, place) for index in request.indices]
        with generators_restored():
            samples = []
            for index, seed in zip(request.indices, request.sample_seeds, strict=True):
                seed_generators(seed)
                samples.append(self._read_one(index, place))
            return samples

    def _read_one(self, index: Any, place: list[Any]) -> Any:
        place[:] = [index]
        return self.dataset[index]


class Collation:
    """The user's `collate_fn`, or PyTorch's own, around what a `SampleReader` gives."""

    def __init__(self, collate_fn: Callable[[Any], Any] | None) -> None:
        self.collate_fn = collate_fn

    def __call__(self, read: SamplesRead | ReadingFailure) -> BatchRead | ReadingFailure:
        """The batch; a failure passes through."""
        if isinstance(read, ReadingFailure):
            return read
        if read.columns is not None:
            return BatchRead(data=read.columns, request=read.request)
        if self.collate_fn is None:
            return BatchRead(data=default_collate(read.samples), request=read.request)
        before = _generator_states() if read.request.divided else None
        data = self.collate_fn(read.samples)
        if before is not None and not _same_states(before, _generator_states()):
            failure = ReadingFailure(
                found="a collate_fn that draws random numbers, which each rank would draw for its own rows",
                fix='pass reading="replicated": every rank then collates the whole batch as one device does',
                where=None,
            )
            if get_worker_info() is None:
                raise failure.as_error()
            return failure
        return BatchRead(data=data, request=read.request)


def has_plain_columns(dataset: object) -> bool:
    """Whether reading rows of tensors at once gives what collating samples does, with no randomness."""
    return type(dataset) is TensorDataset and all(
        type(tensor) is torch.Tensor and tensor.is_contiguous() and tensor.layout is torch.strided
        for tensor in dataset.tensors
    )


def seed_generators(seed: int) -> None:
    """Start torch's CPU generator, NumPy's and `random` from one 64-bit seed."""
    torch.default_generator.manual_seed(seed)
    # Both are Mersenne twisters started from 32 bits, torch's from the lower: alike, they would draw alike.
    numpy.random.seed(seed >> 32)
    random.seed(seed)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Whatever is drawn inside leaves torch's CPU generator, NumPy's and `random` as they were."""
    torch_state, numpy_state, python_state = _generator_states()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        numpy.random.set_state(numpy_state)
        random.setstate(python_state)


def _generator_states() -> tuple[torch.Tensor, Any, Any]:
    return torch.default_generator.get_state(), numpy.random.get_state(), random.getstate()


def _same_states(one: tuple[torch.Tensor, Any, Any], other: tuple[torch.Tensor, Any, Any]) -> bool:
    numpy_same = all(numpy.array_equal(left, right) for left, right in zip(one[1], other[1], strict=True))
    return bool(torch.equal(one[0], other[0])) and numpy_same and one[2] == other[2]


def _failure(error: Exception, place: list[Any], request: BatchRequest) -> ReadingFailure:
    frames = traceback.extract_tb(error.__traceback__)
    named = f"index {place[0]!r}" if place else f"one of the indices {list(request.indices)[:8]}"
    found = f"{type(error).__name__}: {error} ({named})"
    if get_worker_info() is not None:
        found += "\n" + "".join(traceback.format_exception(error)).rstrip()
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
    return ReadingFailure(found=found, fix="mend the data set: it raised while this sample was read", where=where)
