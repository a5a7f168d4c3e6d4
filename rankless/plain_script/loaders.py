"""`DataLoader` in the logical view: the same batches, in the same order, of which each rank holds its rows."""

import contextlib
import sys
from collections.abc import Iterator, Sized
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.context.world import World
from rankless.data.batch_tree import compute_digest, map_leaves, map_tensors
from rankless.data.logical_tensor import LogicalTensor
from rankless.logical_view.call_observers import OBSERVERS
from rankless.logical_view.tensor import DividedTensor, LogicalView, shard_rows
from rankless.parallel.batch_division import BatchDivision
from rankless.parallel.tensor_placement import Shard
from rankless.plain_script.effects_on_first_rank import Effects
from rankless.plain_script.per_rank_sample_reading import LoaderState, SharedReading

ITERATE = DataLoader.__iter__


@contextlib.contextmanager
def divide_batches(view: LogicalView, world: World, effects: Effects | None = None) -> Iterator[None]:
    """Within the context, each `DataLoader` yields logical batches.

    Args:
        view: The ranks.
        world: The same ranks, with what takes part in their steps.
        effects: What the script's ranks do once, if there is anything.
    """

    known: WeakKeyDictionary[DataLoader[Any], LoaderState] = WeakKeyDictionary()

    def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
        # Rankless's own readers divide batches themselves, and a thread reads whole ones.
        is_own = sys._getframe(1).f_globals.get("__name__", "").startswith("rankless.")
        if is_own or not view.agreement.is_script_thread():
            return ITERATE(loader)
        reading = make_reading(loader, known.setdefault(loader, LoaderState()), view, effects)
        return LogicalPass(loader, reading, view, world)

    with replace_attributes((DataLoader, "__iter__", iterate)):
        yield


def make_reading(
    loader: "DataLoader[Any]", state: LoaderState, view: LogicalView, effects: Effects | None
) -> SharedReading | None:
    """Return what reads a pass over a loader; None if every rank reads whole batches."""
    if state.persistent is not None:
        return state.persistent
    if not SharedReading.can_share(loader):
        return None
    reading = SharedReading(loader, state, view.mesh, effects)
    state.persistent = reading if loader.persistent_workers else None
    return reading


class LogicalPass:
    """A pass over a `DataLoader`, whose batches are logical.

    Args:
        loader: The loader.
        reading: Reads each rank's rows; None if every rank reads whole batches.
        view: The ranks.
        world: The same ranks, with what takes part in their steps.
    """

    def __init__(
        self, loader: "DataLoader[Any]", reading: SharedReading | None, view: LogicalView, world: World
    ) -> None:
        self._loader, self._reading, self._view, self._world = loader, reading, view, world
        self._where = f"a pass over a DataLoader of {type(loader.dataset).__name__}"
        view.agreement.check(self._where, generators=True)
        self._wholes: Iterator[Any] = iter(())
        if reading is None:
            self._wholes = ITERATE(loader)
        else:
            reading.begin()
        self._number = 0
        self._is_shared = False
        batches = self._count_batches()
        self._pass = world.passes.begin(batches=batches)
        world.events.begin_pass(self._pass, batches=batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        try:
            batch, rows = self._take_whole() if self._reading is None else self._take_shared(self._reading)
        except StopIteration:
            self._view.batch_rows = 0
            self._world.events.end_pass(self._pass)
            raise
        self._number += 1
        self._view.batch_rows = rows
        self._world.events.begin_batch(self._pass, rows=rows)
        self._view.agreement.check(f"batch {self._number} of {self._where}")
        for observer in OBSERVERS:
            observer.hear_batch(self._where.removeprefix("a pass over "), batch, is_shared=self._is_shared)
        return batch

    def _take_whole(self) -> tuple[Any, int]:
        """Return the next batch, which every rank reads, and the number of its rows."""
        batch = next(self._wholes)
        self._view.agreement.note(compute_digest(batch), "the batch, with the digest")
        rows = find_rows(batch, *self._list_sizes())
        return divide_batch(batch, self._view, rows=rows), rows

    def _take_shared(self, reading: SharedReading) -> tuple[Any, int]:
        """Return the next batch, of which this rank reads its rows, and the number of all rows."""
        read = reading.take()
        self._view.agreement.note((read.key.indices, read.common), "the batch, with indices and first sample")
        rows, self._is_shared = len(read.key.indices), not read.is_whole
        if read.is_whole:
            return divide_batch(read.data, self._view, rows=find_rows(read.data, rows)), rows
        lengths = BatchDivision.of(self._view.mesh).split(rows)
        return map_tensors(lambda leaf: shard_rows(leaf, lengths, self._view), read.data), rows

    def _list_sizes(self) -> tuple[int, ...]:
        """Return the numbers of samples of a full batch and of the last one, as far as they are known."""
        full, dataset = self._loader.batch_size, self._loader.dataset
        if full is None:
            return ()
        return (full, len(dataset) % full) if isinstance(dataset, Sized) else (full,)

    def _count_batches(self) -> int | None:
        try:
            return len(self._loader)
        except TypeError:
            return None


def find_rows(batch: Any, *samples: int) -> int:
    """Return the number of rows along which a batch is divided, or 0 if it has none.

    Args:
        batch: The batch.
        samples: How many samples it may have. A function that collates may put them along another dim than the first.
    """
    tensors = list_tensors(batch)
    first = [size for leaf in tensors for size in leaf.shape[:1]]
    every = [size for leaf in tensors for size in leaf.shape]
    known = [size for sizes in (first, every) for size in samples if size and size in sizes]
    return known[0] if known else max(first, key=first.count, default=0)


def divide_batch(batch: Any, view: LogicalView, *, rows: int) -> Any:
    """Return a batch with logical tensors in place of plain ones.

    Args:
        batch: A tensor, or containers of tensors and anything else. Every rank has all of it.
        view: The ranks.
        rows: The number of rows. Tensors without a dim of this size stay whole.
    """
    return map_leaves(lambda _, leaf: divide_tensor(leaf, view, rows=rows), batch, is_leaf=is_packed)


def shard_whole(batch: Any, view: LogicalView) -> Any:
    """Return a batch that the script itself has made, divided along dim 0 of most of its tensors. Collective."""
    view.agreement.note(compute_digest(batch), "the batch, with the digest")
    view.agreement.check("rankless.shard_batch")
    view.batch_rows = find_rows(batch)
    found = divide_batch(batch, view, rows=view.batch_rows)
    for observer in OBSERVERS:
        observer.hear_batch("rankless.shard_batch", found, is_shared=False)
    return found


def shard_loaded(batch: Any, view: LogicalView) -> Any:
    """Return a batch of a `rankless.loader` with the view's logical tensors in place of those of jobs."""
    found = map_tensors(lambda leaf: convert_tensor(leaf, view), batch)
    for observer in OBSERVERS:
        observer.hear_batch("rankless.loader", found, is_shared=True)
    return found


def convert_tensor(tensor: Tensor, view: LogicalView) -> Tensor:
    """Return a tensor of a `rankless.loader` as the view's; a plain one as it is."""
    if not isinstance(tensor, LogicalTensor) or not isinstance(tensor.placement, Shard):
        return tensor
    # Memory of its own: a change in place of one must not reach the other.
    return DividedTensor(tensor.local.clone(), tensor.placement, tuple(tensor.shape), view)


def is_packed(part: Any) -> bool:
    """Return whether a part of a batch is one whose tensors belong together."""
    return isinstance(part, PackedSequence)


def list_tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch."""
    found: list[Tensor] = []
    map_leaves(
        lambda _, leaf: found.append(leaf) if isinstance(leaf, Tensor) else None,
        batch,
        is_leaf=is_packed,
    )
    return found


def divide_tensor(leaf: Any, view: LogicalView, *, rows: int) -> Any:
    """Return a plain tensor as a logical one along its first dim with so many rows; anything else as it is."""
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or rows not in leaf.shape or rows < view.axis.size:
        return leaf
    dim = leaf.shape.index(rows)
    lengths = BatchDivision.of(view.mesh).split(rows)
    placement = Shard(dim, lengths)
    # Memory of its own: a change in place of the rows must not look like one of the whole.
    own = leaf.narrow(dim, placement.start(view.axis.rank), lengths[view.axis.rank]).clone()
    return DividedTensor(own, placement, tuple(leaf.shape), view)
