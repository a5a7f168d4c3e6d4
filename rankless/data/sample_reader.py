"""Read the samples of one batch, in the script's process or in a reader process of `DataLoader`."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from rankless.data.batch_tree import compute_digest, map_leaves
from rankless.data.random_generators import Generator, find_generators, preserve_generators, seed_generators
from rankless.errors import DataError
from rankless.user_code import display_name


@dataclass(frozen=True, kw_only=True)
class Division:
    """The whole batch behind a request, and how ranks divide it: what the probe of a `collate_fn` needs."""

    indices: Sequence[Any]
    lengths: tuple[int, ...]
    """Number of rows of each rank."""
    rank: int
    sample_seeds: Sequence[int] | None = None
    in_stream: bool = False
    """Whether the reader has all samples anyway, and therefore decides for each batch who collates what."""

    @property
    def own(self) -> slice:
        """This rank's part of the whole batch."""
        start = sum(self.lengths[: self.rank])
        return slice(start, start + self.lengths[self.rank])


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What the probe of a `collate_fn` found; see Note [probed collation]."""

    reason: str = ""
    """Why every rank must collate the whole batch, or nothing if each may collate its own rows."""
    is_random: bool = False
    """Whether the reason is that the `collate_fn` draws random numbers."""


@dataclass(frozen=True, kw_only=True)
class WholeBatch:
    """All samples of a batch, to read it without a worker that was lost."""

    indices: Sequence[Any]
    sample_seeds: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """One batch as this rank reads it."""

    indices: Sequence[Any]
    rows: int | None
    """Rows of the whole batch, over all ranks; None if the data set returns whole batches."""
    is_split: bool
    """Whether `indices` are only this rank's samples."""
    digest: bytes
    """Digest of the whole batch's indices and the epoch's seed, or of a stream's samples. Equal on all ranks."""
    sample_seeds: Sequence[int] | None = None
    """One seed for each index; None to draw from the process's generators."""
    division: Division | None = None
    """What a probe of the `collate_fn` needs; None if this batch is not probed."""
    whole: WholeBatch | None = None
    """All samples of a split batch, where a worker may be lost."""
    common: tuple[Any, int] | None = None
    """Index and seed of a sample that all ranks read, to compare their data sets."""


@dataclass(frozen=True, kw_only=True)
class BatchRead:
    """A collated batch with its request."""

    data: Any
    request: BatchRequest
    probe: ProbeResult | None = None
    """What the probe found; None if the batch was not probed."""
    common: bytes = b""
    """A digest of the sample that all ranks read; empty if there is none, or if it is another one each time."""

    def pin_memory(self) -> "BatchRead":
        """Return the batch in page-locked memory. `DataLoader` calls it."""
        return replace(self, data=pin_memory(self.data))


@dataclass(frozen=True, kw_only=True)
class ReadFailure:
    """An error as plain data. A reader process sends it, because not every exception can be pickled."""

    found: str
    fix: str
    where: str | None = None
    trace: str = ""
    """The traceback in the reader process."""

    def as_error(self) -> DataError:
        """Return the error to raise in the script's process."""
        error = DataError(
            expected="samples and batches that can be read", found=self.found, fix=self.fix, where=self.where
        )
        error.__cause__ = ReaderProcessError(self.trace) if self.trace else None
        return error


class ReaderProcessError(Exception):
    """The cause of an error from a reader process. Its text is the traceback there."""

    def __str__(self) -> str:
        return f"in a reader process:\n{self.args[0]}"


@dataclass(frozen=True, kw_only=True)
class SamplesRead:
    """Samples before collation.

    `columns` replaces them if whole tensors were indexed, and `batch` if the data set returned a whole batch.
    """

    request: BatchRequest
    samples: Any = None
    columns: list[torch.Tensor] | None = None
    batch: Any = None
    read_others: Callable[[slice], list[Any]] | None = None
    """Reads samples of the whole batch that belong to other ranks."""
    common: bytes = b""
    """As in `BatchRead`."""


class SampleReader(Dataset[Any]):
    """The data set that the inner `DataLoader` sees. It returns the samples of a `BatchRequest`."""

    def __init__(self, dataset: Any, *, as_columns: bool, as_batches: bool = False) -> None:
        self.dataset = dataset
        self.as_columns = as_columns
        self.as_batches = as_batches
        self._generators: dict[str, Generator] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, request: BatchRequest) -> SamplesRead | ReadFailure:
        """Return all samples of a request, or the failure."""
        read = self._read_samples(request)
        return replace(read, common=self._digest_common(request)) if isinstance(read, SamplesRead) else read

    def _read_samples(self, request: BatchRequest) -> SamplesRead | ReadFailure:
        if self.as_columns:
            rows = torch.tensor(request.indices, dtype=torch.int64, device="cpu")
            columns = [tensor.index_select(0, rows) for tensor in self.dataset.tensors]
            return SamplesRead(request=request, columns=columns)
        current_index: list[Any] = []
        try:
            if self.as_batches:
                return SamplesRead(request=request, batch=self._read_one(request.indices[0], current_index))
            samples = self._read(request, current_index)
            return SamplesRead(request=request, samples=samples, read_others=partial(self._read_others, request))
        except Exception as error:  # user code may raise anything; add the sample's name
            named = (
                f"index {current_index[0]!r}" if current_index else f"one of the indices {list(request.indices)[:8]}"
            )
            return report_read_failure(error, named)

    def _read(self, request: BatchRequest, current_index: list[Any]) -> Any:
        """Return the samples. `place` holds the index that is being read, for the error text."""
        if request.sample_seeds is None:
            read_many = getattr(self.dataset, "__getitems__", None)
            if read_many:
                return read_many(list(request.indices))
            return [self._read_one(index, current_index) for index in request.indices]
        if self._generators is None:
            self._generators = find_generators(self.dataset)  # in the reading process, after the user's worker_init_fn
        with preserve_generators(self._generators):
            samples = []
            for index, seed in zip(request.indices, request.sample_seeds, strict=True):
                seed_generators(seed, self._generators)
                samples.append(self._read_one(index, current_index))
            return samples

    def _read_others(self, request: BatchRequest, part: slice) -> list[Any]:
        """Return samples of the whole batch, as the rank that owns them reads them."""
        division = request.division
        assert division is not None
        seeds = None if division.sample_seeds is None else division.sample_seeds[part]
        return list(self._read(replace(request, indices=division.indices[part], sample_seeds=seeds), []))

    def _digest_common(self, request: BatchRequest) -> bytes:
        if request.common is None:
            return b""
        index, seed = request.common
        try:
            first, second = (digest_sample(self.dataset, index, seed=seed) for _ in range(2))
        except Exception:  # the rank that needs the sample reports it
            return b""
        return first if first == second else b""

    def _read_one(self, index: Any, current_index: list[Any]) -> Any:
        current_index[:] = [index]
        return self.dataset[index]


class ReaderInit:
    """The `worker_init_fn` of reader processes."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self.function = function

    def __call__(self, number: int) -> None:
        """Show the user's data set in `get_worker_info()`, then call the user's function."""
        info = get_worker_info()
        assert info is not None
        # Scripts change `get_worker_info().dataset` here, as PyTorch documents: the reader must use that object.
        object.__setattr__(info, "dataset", vars(info.dataset)["dataset"])
        if self.function is not None:
            self.function(number)


def digest_sample(dataset: Any, index: Any, *, seed: int) -> bytes:
    """Return a digest of a sample, read with random numbers from a seed. No generator changes.

    Of paths only the last part counts: hosts may keep the same files in different folders.
    """
    generators = find_generators(dataset)
    with preserve_generators(generators):
        seed_generators(seed, generators)
        sample = dataset[index]
    return compute_digest(map_leaves(lambda _, leaf: Path(leaf).name if isinstance(leaf, str) else leaf, sample))


def has_plain_columns(dataset: object) -> bool:
    """Whether indexing whole tensors equals collating single samples, and draws nothing."""
    return type(dataset) is TensorDataset and all(
        type(tensor) is torch.Tensor and tensor.is_contiguous() and tensor.layout is torch.strided
        for tensor in dataset.tensors
    )


def report_read_failure(error: Exception, named: str) -> ReadFailure:
    """Raise the data set's error with the sample's name; in a reader process return it instead."""
    frames = traceback.extract_tb(error.__traceback__)
    found = f"{type(error).__name__}: {error} ({named})"
    where = f"{display_name(frames[-1].filename)}:{frames[-1].lineno}" if frames else None
    fix = "correct the data set, which raised while this sample was read"
    if get_worker_info() is None:
        raise ReadFailure(found=found, fix=fix, where=where).as_error() from error
    trace = "".join(traceback.format_exception(error)).rstrip()
    return ReadFailure(found=found, fix=fix, where=where, trace=trace)
