"""Read batches, and copy them to the device, one batch ahead of the computation if that changes no random number.

Note [copy one batch ahead]: reader processes read the next batch anyway, so requesting it early costs nothing and draws
nothing. Without reader processes, reading draws from the process's generators when the script requests the batch, and
must not happen earlier. In that case a batch is copied when it is requested.

Note [batches read twice]: a batch may be read early if that draws no random number and the script cannot notice it.
Reader processes read early anyway. Without them that holds for a `TensorDataset` in the order of PyTorch's samplers.
The script may change its tensors before the batch is due, so it is then read again. The last batch is not read early:
a sampler draws once more when its last index has been taken.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from rankless.context.upcoming_batches import UpcomingBatches
from rankless.data.batch_tree import iterate_leaves, map_tensors
from rankless.data.logical_tensor import LogicalTensor

Item = TypeVar("Item")


class Copier(Protocol):
    """Copies batches to a device: `start` may return before the copy is complete, `finish` waits for it."""

    def start(self, batch: Any) -> Any:
        """Return the batch on the device; the copy may still be running."""

    def finish(self, batch: Any) -> Any:
        """Return the batch that `start` returned, ready for the next computation."""


class PlainCopier:
    """Copies synchronously."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, batch: Any) -> Any:
        """Return the batch on the device."""
        return map_tensors(lambda tensor: tensor.to(self._device), batch)

    def finish(self, batch: Any) -> Any:
        """Return the same batch."""
        return batch


class StreamCopier:
    """Copies on a separate accelerator stream, from page-locked memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._accelerator = torch.get_device_module(device)
        self._stream = self._accelerator.Stream(device)

    def start(self, batch: Any) -> Any:
        """Return the batch on the device while the copy is running."""
        with self._accelerator.stream(self._stream):
            return map_tensors(self._copy, batch)

    def finish(self, batch: Any) -> Any:
        """Return the same batch after making the current stream wait for the copy."""
        present = self._accelerator.current_stream(self._device)
        present.wait_stream(self._stream)
        # The memory was allocated on the other stream; record_stream keeps it until this stream has read it.
        map_tensors(lambda tensor: get_local_data(tensor).record_stream(present), batch)
        return batch

    def _copy(self, tensor: Tensor) -> Tensor:
        pinned = tensor if tensor.device.type != "cpu" or get_local_data(tensor).is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)


def make_copier(device: torch.device) -> Copier:
    """Return the copier for a kind of device."""
    return PlainCopier(device) if device.type == "cpu" else StreamCopier(device)


def get_local_data(tensor: Tensor) -> Tensor:
    """Return the plain tensor that holds the data: the local rows of a logical tensor."""
    local: Tensor = getattr(tensor, "local", tensor)
    return local


def copy_to_device(items: Iterator[tuple[Item, Any]], *, copier: Copier, ahead: bool) -> Iterator[tuple[Item, Any]]:
    """Yield each item with its batch on the device.

    With `ahead` the copy of the next batch starts before the current one is yielded. An error of the next batch is
    raised after the current batch.
    """
    if not ahead:
        yield from ((item, copier.finish(copier.start(batch))) for item, batch in items)
        return
    started = ((item, copier.start(batch)) for item, batch in items)
    pending = _take_next(started)
    while (entry := pending.use()) is not None:
        pending = _take_next(started)
        yield entry[0], copier.finish(entry[1])


class _Taken(NamedTuple):
    """What an iterator has given: an item with its batch, None at its end, or an error."""

    found: tuple[Any, Any] | None
    error: Exception | None = None

    def use(self) -> tuple[Any, Any] | None:
        """Return the item with its batch, None at the end. Raises the error."""
        if self.error is not None:
            raise self.error
        return self.found


def _take_next(items: Iterator[tuple[Any, Any]]) -> _Taken:
    """Take the next item, or the error that it raises."""
    try:
        return _Taken(next(items, None))
    except Exception as error:  # any error must be raised after the previous batch was yielded
        return _Taken(None, error)


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
    following: _Taken | None = None
    try:
        for number in itertools.count(1):
            found = (following or _take_next(batches)).use()
            if found is None:
                return
            item, batch = found
            if following is not None and read_again is not None:
                batch = read_again(item)
            following = _take_next(batches) if upcoming.is_wanted and number < most else None
            next_batch = None if following is None or following.found is None else following.found[1]
            upcoming.note(batches, {} if next_batch is None else _pair_tensors(batch, next_batch))
            yield item, batch
    finally:
        upcoming.forget(batches)


def _pair_tensors(batch: Any, following: Any) -> dict[int, Tensor]:
    """Return the tensor of the next batch for the fingerprint of each tensor of this one, where both have one."""
    tensors = {path: leaf for path, leaf in iterate_leaves(following) if isinstance(leaf, LogicalTensor)}
    return {
        leaf.fingerprint: tensors[path]
        for path, leaf in iterate_leaves(batch)
        if isinstance(leaf, LogicalTensor) and leaf.fingerprint and path in tensors
    }
