"""Reading the samples of one batch: in the script's process, or in a loader's reader processes."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from rankless.data.generators import Generator, find_generators, preserve_generators, seed_generators
from rankless.errors import DataError


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """One batch as this rank reads it."""

    indices: Sequence[Any]
    rows: int | None
    """Of the whole batch, of all ranks; None where the data set makes the batch."""
    is_split: bool
    """Whether `indices` are this rank's part only."""
    digest: bytes
    """Of the whole batch's indices and the epoch's seed (of a stream: of its samples): equal on every rank, or
    the ranks have parted."""
    sample_seeds: Sequence[int] | None = None
    """One for each index, or None: read from the running generators."""


@dataclass(frozen=True, kw_only=True)
class BatchRead:
    """A batch collated, with the request that it answers."""

    data: Any
    request: BatchRequest

    def pin_memory(self) -> "BatchRead":
        """The same in page-locked memory; DataLoader calls it."""
        return replace(self, data=pin_memory(self.data))


@dataclass(frozen=True, kw_only=True)
class ReadFailure:
    """An error on its way from a reader process, where exceptions of unknown types do not travel well."""

    found: str
    fix: str
    where: str | None = None
    trace: str = ""
    """The traceback as the reader process has it."""

    def as_error(self) -> DataError:
        """The error to raise in the script's process."""
        error = DataError(
            expected="samples and batches that can be read", found=self.found, fix=self.fix, where=self.where
        )
        error.__cause__ = ReaderProcessError(self.trace) if self.trace else None
        return error


class ReaderProcessError(Exception):
    """Stands for an error in a reader process: its text is the traceback there."""

    def __str__(self) -> str:
        return f"in a reader process:\n{self.args[0]}"


@dataclass(frozen=True, kw_only=True)
class SamplesRead:
    """Samples on their way to collation; `columns` instead where they are read as whole tensors, and `batch`
    where the data set has made a whole batch.
    """

    request: BatchRequest
    samples: Any = None
    columns: list[torch.Tensor] | None = None
    batch: Any = None


class SampleReader(Dataset[Any]):
    """The user's data set as DataLoader sees it: asked for a `BatchRequest`, it gives the samples."""

    def __init__(self, dataset: Any, *, as_columns: bool, as_batches: bool = False) -> None:
        self.dataset = dataset
        self.as_columns = as_columns
        self.as_batches = as_batches
        self._held: dict[str, Generator] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, request: BatchRequest) -> SamplesRead | ReadFailure:
        """All samples of a request."""
        if self.as_columns:
            rows = torch.tensor(request.indices, dtype=torch.int64)
            columns = [tensor.index_select(0, rows) for tensor in self.dataset.tensors]
            return SamplesRead(request=request, columns=columns)
        place: list[Any] = []
        try:
            if self.as_batches:
                return SamplesRead(request=request, batch=self._read_one(request.indices[0], place))
            return SamplesRead(request=request, samples=self._read(request, place))
        except Exception as error:  # a data set is foreign code; its error is given the sample's name
            named = f"index {place[0]!r}" if place else f"one of the indices {list(request.indices)[:8]}"
            return report_read_failure(error, named)

    def _read(self, request: BatchRequest, place: list[Any]) -> Any:
        """The samples; `place` holds the index that is being read, for the sake of an error's text."""
        if request.sample_seeds is None:
            read_many = getattr(self.dataset, "__getitems__", None)
            if read_many:
                return read_many(list(request.indices))
            return [self._read_one(index, place) for index in request.indices]
        if self._held is None:
            self._held = find_generators(self.dataset)  # in the process that reads, after the user's worker_init_fn
        with preserve_generators(self._held):
            samples = []
            for index, seed in zip(request.indices, request.sample_seeds, strict=True):
                seed_generators(seed, self._held)
                samples.append(self._read_one(index, place))
            return samples

    def _read_one(self, index: Any, place: list[Any]) -> Any:
        place[:] = [index]
        return self.dataset[index]


class ReaderInit:
    """What a reader process does first: PyTorch shows it the user's own data set, then comes the user's function."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self.function = function

    def __call__(self, number: int) -> None:
        """Prepare the reader process of that number."""
        info = get_worker_info()
        assert info is not None
        # Scripts change `get_worker_info().dataset` here, as PyTorch's manual has it: that must be what is read.
        object.__setattr__(info, "dataset", vars(info.dataset)["dataset"])
        if self.function is not None:
            self.function(number)


def has_plain_columns(dataset: object) -> bool:
    """Whether reading rows of tensors at once gives what collating samples does, with no randomness."""
    return type(dataset) is TensorDataset and all(
        type(tensor) is torch.Tensor and tensor.is_contiguous() and tensor.layout is torch.strided
        for tensor in dataset.tensors
    )


def report_read_failure(error: Exception, named: str) -> ReadFailure:
    """What becomes of a data set's error: raised here with the sample's name, or sent up by a reader process."""
    frames = traceback.extract_tb(error.__traceback__)
    found = f"{type(error).__name__}: {error} ({named})"
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
    fix = "mend the data set: it raised while this sample was read"
    if get_worker_info() is None:
        raise ReadFailure(found=found, fix=fix, where=where).as_error() from error
    trace = "".join(traceback.format_exception(error)).rstrip()
    return ReadFailure(found=found, fix=fix, where=where, trace=trace)
