"""Read a batch of a `DataLoader` so that each rank reads its own samples, with the random numbers of one device.

Note [random numbers of shared reading]: on one device the samples of a batch are read one after the other, and a data
set that draws random numbers draws them from the generators of the process. A rank that reads some samples alone would
draw other numbers. So each read watches the generators. If a rank has drawn, or could not read, then all ranks read
the whole batch, from the generators' states before; and from then on they read all batches of this loader whole. A
reader process cannot go back to an earlier batch: the pass begins again there, with the same seed and the same indices,
and skips the batches that the script has had.
"""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from rankless.collectives.mesh_collectives import all_reduce_maximum
from rankless.data.batch_tree import iterate_leaves
from rankless.data.random_generators import (
    Generator,
    ProcessStates,
    find_changed_generators,
    find_generators,
    get_process_states,
    get_states,
    set_process_states,
    set_states,
)
from rankless.data.sample_reader import ReaderInit, digest_sample, has_plain_columns
from rankless.parallel.batch_division import BatchDivision
from rankless.parallel.mesh import Mesh
from rankless.plain_script.effects_on_first_rank import Effects, EffectWhileReading


class BatchKey(NamedTuple):
    """What a reader gets for each batch."""

    indices: list[Any]
    """The samples of the whole batch."""
    is_compared: bool
    """Whether all ranks read the first sample, to compare their data sets."""


class RowsRead(NamedTuple):
    """A batch as a rank has read it. A tuple, because `DataLoader` moves its tensors to page-locked memory."""

    data: Any
    """The collated rows; None if they could not be read."""
    key: BatchKey
    is_whole: bool
    """Whether `data` has all rows."""
    must_be_whole: bool
    """Whether all ranks must read the whole batch."""
    common: bytes
    """A digest of the sample that all ranks read, or nothing."""


class OwnRowReader(Dataset[Any]):
    """The data set of the inner `DataLoader`: it returns this rank's rows of a batch.

    Args:
        loader: The script's loader. It has a data set with indices, and makes batches itself.
        division: How the ranks divide a batch.
        effects: What the script's ranks do once, if there is anything.
        has_columns: Whether whole tensors are indexed, which draws nothing.
    """

    def __init__(
        self, loader: "DataLoader[Any]", division: BatchDivision, effects: Effects | None, *, has_columns: bool
    ) -> None:
        self.dataset: Any = loader.dataset
        self._effects = effects
        self._collate = loader.collate_fn
        self._division = division
        self._has_columns = has_columns
        self.reads_whole = False
        """Whether to read all rows."""
        self._generators: dict[str, Generator] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a reader process gets, which shares no effects."""
        return vars(self) | {"_effects": None}

    def __getitem__(self, key: BatchKey) -> RowsRead:
        """Return this rank's rows, or all rows if it must have them."""
        lengths = self._division.split(len(key.indices))
        if self.reads_whole or not self._division.divides(len(key.indices)):
            return RowsRead(self.read(key.indices), key, is_whole=True, must_be_whole=False, common=b"")
        own = self._division.own_part
        start = sum(lengths[:own])
        indices = key.indices[start : start + lengths[own]]
        if self._has_columns:
            return RowsRead(self.read(indices), key, is_whole=False, must_be_whole=False, common=b"")
        if self._generators is None:  # in the reading process, after the script's worker_init_fn
            self._generators = find_generators(self.dataset)
        before = get_process_states(), copy.deepcopy(get_states(self._generators))
        try:
            with contextlib.nullcontext() if self._effects is None else self._effects.refused():
                data = self.read(indices)
        except (Exception, EffectWhileReading):
            # The script's data set may raise anything, or write a file: then all ranks read the batch.
            data = None
        if self._has_drawn(*before) or not has_rows(data, lengths[own]):
            set_process_states(before[0])
            set_states(self._generators, before[1])
            return RowsRead(None, key, is_whole=False, must_be_whole=True, common=b"")
        common = digest_sample(self.dataset, key.indices[0], seed=0) if key.is_compared else b""
        return RowsRead(data, key, is_whole=False, must_be_whole=False, common=common)

    def read(self, indices: list[Any]) -> Any:
        """Return some samples, collated, as `DataLoader` reads them."""
        if self._has_columns:
            rows = torch.tensor(indices, dtype=torch.int64, device="cpu")
            return [column.index_select(0, rows) for column in self.dataset.tensors]
        read_many = getattr(self.dataset, "__getitems__", None)
        samples = read_many(indices) if read_many else [self.dataset[index] for index in indices]
        return self._collate(samples)

    def _has_drawn(self, states: ProcessStates, held: dict[str, Any]) -> bool:
        assert self._generators is not None
        now = get_states(self._generators)
        return bool(find_changed_generators(states, get_process_states())) or any(
            repr(now[name]) != repr(state) for name, state in held.items()
        )


def has_rows(data: Any, rows: int) -> bool:
    """Return whether a collated batch consists of tensors that have a row for each sample."""
    leaves = [leaf for _, leaf in iterate_leaves(data)]
    return bool(leaves) and all(type(leaf) is Tensor and leaf.shape[:1] == (rows,) for leaf in leaves)


class BatchKeys(Sampler[Any]):
    """The keys of the batches of a pass, from the indices of the script's sampler.

    Args:
        loader: The script's loader.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._sampler: Iterable[Any] = loader._index_sampler
        self._generator = loader.generator or torch.default_generator
        self._taken: list[BatchKey] = []
        self._rest: Iterator[BatchKey] = iter(())
        self.is_compared = False
        """Whether all ranks read the first sample of the first batch."""
        self.begins_again = False
        """Whether the next iteration is of the present pass, from its first batch."""
        self.state_before_base_seed: Tensor | None = None
        """The state of the loader's generator from which it draws the seed of its reader processes; None until then."""

    def __iter__(self) -> Iterator[BatchKey]:
        # A loader with processes calls this twice when a pass begins, and draws their seed in between.
        if self.begins_again:
            return self._repeat()
        # Not inside a generator function: a sampler may draw when its iteration begins.
        self._rest = self._make_keys(iter(self._sampler))
        if self.state_before_base_seed is None:
            self.state_before_base_seed = self._generator.get_state()
        self._taken.clear()
        return self._record()

    def _repeat(self) -> Iterator[BatchKey]:
        self.begins_again, again, self._taken = False, self._taken, []
        self._rest = chain(again, self._rest)
        yield from self._record()

    def _make_keys(self, batches: Iterator[Any]) -> Iterator[BatchKey]:
        for number, indices in enumerate(batches):
            yield BatchKey(list(indices), self.is_compared and number == 0)

    def _record(self) -> Iterator[BatchKey]:
        for key in self._rest:
            self._taken.append(key)
            yield key


class LoaderState:
    """What is known of a script's loader between its passes.

    Attributes:
        reads_whole: Whether all ranks read all samples.
        has_begun: Whether a pass has begun.
        persistent: The reading whose processes persist; None if there is none.
    """

    def __init__(self) -> None:
        self.reads_whole = False
        self.has_begun = False
        self.persistent: SharedReading | None = None


class SharedReading:
    """A pass over a script's `DataLoader`, of whose batches each rank reads its rows.

    With persistent reader processes it is all passes, one after the other.

    Args:
        loader: The script's loader; see `can_share`.
        state: What is known of it.
        mesh: The ranks.
        effects: What the script's ranks do once, if there is anything.
    """

    def __init__(
        self, loader: "DataLoader[Any]", state: LoaderState, mesh: Mesh, effects: Effects | None = None
    ) -> None:
        self._loader, self._state = loader, state
        (self._axis,), self._device = mesh.axes, mesh.device
        self._has_columns = has_plain_columns(loader.dataset)
        self._reader = OwnRowReader(loader, BatchDivision.of(mesh), effects, has_columns=self._has_columns)
        self._reader.reads_whole = state.reads_whole
        self._keys = BatchKeys(loader)
        self._inner = self._make_inner(loader.generator)
        self._reads: Iterator[RowsRead] = iter(())
        self._count = 0

    @staticmethod
    def can_share(loader: "DataLoader[Any]") -> bool:
        """Return whether ranks may read some rows of a loader's batches each.

        A function of the script that collates may need all samples, for example to pad them.
        """
        is_plain = type(loader)._get_iterator is DataLoader._get_iterator and loader._auto_collation
        return is_plain and not isinstance(loader.dataset, IterableDataset) and loader.collate_fn is default_collate

    def begin(self) -> None:
        """Begin a pass: draw what `DataLoader` draws at its start."""
        self._keys.is_compared = not self._state.has_begun and not self._has_columns
        self._state.has_begun, self._count, self._keys.state_before_base_seed = True, 0, None
        self._reads = iter(self._inner)

    def take(self) -> RowsRead:
        """Return the next batch, or raise StopIteration. Collective."""
        read = next(self._reads)
        if not self._reader.reads_whole and not self._has_columns:
            wants_whole = torch.tensor([int(read.must_be_whole)], device=self._device)
            if all_reduce_maximum(wants_whole, among=self._axis).item():
                read = self._read_whole(read)
        self._count += 1
        return read

    def _read_whole(self, read: RowsRead) -> RowsRead:
        """Return the present batch with all rows, and read all later ones so too."""
        self._reader.reads_whole = self._state.reads_whole = True
        if self._loader.num_workers == 0:
            return self._reader[read.key]
        generator = torch.Generator()
        assert self._keys.state_before_base_seed is not None
        generator.set_state(self._keys.state_before_base_seed)
        self._keys.begins_again = True
        self._inner, states = self._make_inner(generator), get_process_states()
        self._reads = iter(self._inner)
        for _ in range(self._count):
            next(self._reads)
        found = next(self._reads)
        set_process_states(states)
        return found

    def _make_inner(self, generator: torch.Generator | None) -> "DataLoader[Any]":
        """Return the loader that reads. Without persistent processes it begins each pass anew, as the script's does."""
        loader = self._loader
        return DataLoader(
            self._reader,
            batch_size=None,
            sampler=self._keys,
            collate_fn=return_unchanged,  # type: ignore[arg-type]  # takes what our reader returns
            worker_init_fn=ReaderInit(loader.worker_init_fn),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            multiprocessing_context=loader.multiprocessing_context,
            generator=generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )


def return_unchanged(read: RowsRead) -> RowsRead:
    """Return what a reader has read."""
    return read
