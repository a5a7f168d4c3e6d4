"""Read one batch early, for jobs that ask servers for rows; see Note [early rows] in `context.upcoming_batches`.

Note [batches read twice]: a batch may be read early if that draws no random number and the script cannot notice it.
Reader processes read early anyway. Without them that holds for a `TensorDataset` in the order of PyTorch's samplers.
The script may change its tensors before the batch is due, so it is then read again. The last batch is not read early:
a sampler draws once more when its last index has been taken.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from rankless.context.upcoming_batches import UpcomingBatches
from rankless.data.batch_tree import iterate_leaves
from rankless.data.logical_tensor import LogicalTensor
from rankless.data.prefetching import Item, start_next


def look_ahead(
    batches: Iterator[tuple[Item, Any]],
    upcoming: UpcomingBatches,
    *,
    most: int,
    read_again: Callable[[Item], Any] | None,
) -> Iterator[tuple[Item, Any]]:
    """Yield each item with its batch. While a job wants it, read one batch early and note what it has.

    An error of a batch that is read early is raised when it is due.

    Args:
        batches: Items and batches.
        upcoming: Receives the tensors of the next batch.
        most: How many batches may have been read, also early ones, while another one is yielded.
        read_again: Reads the batch of an item again when it is due. None: the one that was read early is yielded.
    """
    following: Callable[[], tuple[Item, Any] | None] | None = None
    try:
        for number in itertools.count(1):
            entry = start_next(batches) if following is None else following
            found = entry()
            if found is None:
                return
            item, batch = found
            if following is not None and read_again is not None:
                batch = read_again(item)
            following = start_next(batches) if upcoming.is_wanted and number < most else None
            upcoming.note(batches, {} if following is None else _pair_tensors(batch, following))
            yield item, batch
    finally:
        upcoming.forget(batches)


def _pair_tensors(batch: Any, following: Callable[[], tuple[Any, Any] | None]) -> dict[int, Tensor]:
    """Return the tensor of the next batch for the fingerprint of each tensor of this one; nothing if they differ."""
    try:
        found = following()
    except Exception:  # it is raised when the batch is due
        return {}
    if found is None:
        return {}
    tensors = {path: leaf for path, leaf in iterate_leaves(found[1]) if isinstance(leaf, LogicalTensor)}
    return {
        leaf.fingerprint: tensors[path]
        for path, leaf in iterate_leaves(batch)
        if isinstance(leaf, LogicalTensor) and leaf.fingerprint and path in tensors
    }
