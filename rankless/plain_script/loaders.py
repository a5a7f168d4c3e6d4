"""`DataLoader` in the logical view: the same batches, in the same order, of which each rank holds its rows."""

import contextlib
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.context.world import World
from rankless.data.batch_tree import compute_digest, map_leaves
from rankless.logical.tensor import DividedTensor, LogicalView
from rankless.parallel.batch_division import BatchDivision
from rankless.parallel.tensor_placement import Shard

ITERATE = DataLoader.__iter__


@contextlib.contextmanager
def divide_batches(view: LogicalView, world: World) -> Iterator[None]:
    """Within the context, each `DataLoader` yields logical batches."""

    def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
        return LogicalPass(loader, view, world)

    with replace_attributes((DataLoader, "__iter__", iterate)):
        yield


class LogicalPass:
    """A pass over a `DataLoader`, whose batches are logical.

    Args:
        loader: The loader.
        view: The ranks.
        world: The same ranks, with what takes part in their steps.
    """

    def __init__(self, loader: "DataLoader[Any]", view: LogicalView, world: World) -> None:
        self._loader, self._view, self._world = loader, view, world
        self._where = f"a pass over a DataLoader of {type(loader.dataset).__name__}"
        view.agreement.check(self._where, generators=True)
        self._batches = ITERATE(loader)
        self._number = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches) if isinstance(self._batches, Sized) else len(self._loader)

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._number += 1
        self._view.agreement.note(compute_digest(batch), "the batch, with the digest")
        self._view.agreement.check(f"batch {self._number} of {self._where}")
        return divide_batch(batch, self._view, rows=self._loader.batch_size)


def divide_batch(batch: Any, view: LogicalView, *, rows: int | None) -> Any:
    """Return a batch with logical tensors in place of plain ones.

    Args:
        batch: A tensor, or containers of tensors and anything else. Every rank has all of it.
        view: The ranks.
        rows: The number of samples that the loader puts into a full batch; None if its data set makes batches.
    """
    sizes = [size for leaf in list_tensors(batch) for size in leaf.shape[:1]]
    if rows is None or rows not in sizes:
        rows = max(sizes, key=sizes.count, default=None)
    if rows is None or rows < view.axis.size:
        return batch
    count = rows
    return map_leaves(
        lambda _, leaf: divide_tensor(leaf, view, rows=count),
        batch,
        is_leaf=lambda leaf: isinstance(leaf, PackedSequence),
    )


def list_tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch."""
    found: list[Tensor] = []
    map_leaves(
        lambda _, leaf: found.append(leaf) if isinstance(leaf, Tensor) else None,
        batch,
        is_leaf=lambda leaf: isinstance(leaf, PackedSequence),
    )
    return found


def divide_tensor(leaf: Any, view: LogicalView, *, rows: int) -> Any:
    """Return a plain tensor as a logical one along its first dim with so many rows; anything else as it is."""
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or rows not in leaf.shape:
        return leaf
    dim = leaf.shape.index(rows)
    lengths = BatchDivision.of(view.mesh).split(rows)
    placement = Shard(dim, lengths)
    # Memory of its own: a change in place of the rows must not look like one of the whole.
    own = leaf.narrow(dim, placement.start(view.axis.rank), lengths[view.axis.rank]).clone()
    return DividedTensor(own, placement, tuple(leaf.shape), view)
