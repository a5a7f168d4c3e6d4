"""Batches onto the device: copied one ahead, beside the computation, where that changes no random number.

Note [one ahead]: with reader processes the next batch is read anyway, so taking it early costs nothing and draws
nothing. In the script's own process reading draws from the running generators when the script asks for the batch, and
must not come earlier: then a batch is copied when it is asked for.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rankless.data.batch_tree import map_tensors

Item = TypeVar("Item")


class Copier(Protocol):
    """Copies batches to a device: begins beside the computation, and is waited for where the batch is used."""

    def start(self, batch: Any) -> Any:
        """The batch on the device; its data may still be on its way."""

    def finish(self, batch: Any) -> Any:
        """The batch that `start` gave, ready for whatever is computed next."""


class PlainCopier:
    """Copies at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, batch: Any) -> Any:
        """The batch on the device."""
        return map_tensors(lambda tensor: tensor.to(self._device), batch)

    def finish(self, batch: Any) -> Any:
        """The same batch."""
        return batch


class StreamCopier:
    """Copies on an accelerator's stream of its own, from page-locked memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._accelerator = torch.get_device_module(device)
        self._stream = self._accelerator.Stream(device)

    def start(self, batch: Any) -> Any:
        """The batch on the device, while its data is on its way."""
        with self._accelerator.stream(self._stream):
            return map_tensors(self._copy, batch)

    def finish(self, batch: Any) -> Any:
        """The same batch; what the present stream computes from now on sees all of it."""
        present = self._accelerator.current_stream(self._device)
        present.wait_stream(self._stream)
        # The memory was taken on the other stream, and must not be given away while this one still reads it.
        map_tensors(lambda tensor: get_local_data(tensor).record_stream(present), batch)
        return batch

    def _copy(self, tensor: Tensor) -> Tensor:
        pinned = tensor if tensor.device.type != "cpu" or get_local_data(tensor).is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)


def make_copier(device: torch.device) -> Copier:
    """What copies to this kind of device."""
    return PlainCopier(device) if device.type == "cpu" else StreamCopier(device)


def get_local_data(tensor: Tensor) -> Tensor:
    """The plain tensor that holds a tensor's data: a logical one's own rows."""
    local: Tensor = getattr(tensor, "local", tensor)
    return local


def copy_to_device(items: Iterator[tuple[Item, Any]], *, copier: Copier, ahead: bool) -> Iterator[tuple[Item, Any]]:
    """Each item's batch on the device. With `ahead` the next is taken and begun before one is handed out; what that
    raises is raised after it.
    """
    if not ahead:
        yield from ((item, copier.finish(copier.start(batch))) for item, batch in items)
        return
    watch_wait: Callable[[], tuple[Item, Any] | None] = _start_next(items, copier)
    while (entry := watch_wait()) is not None:
        watch_wait = _start_next(items, copier)
        yield entry[0], copier.finish(entry[1])


def _start_next(items: Iterator[tuple[Item, Any]], copier: Copier) -> Callable[[], tuple[Item, Any] | None]:
    """What gives the next item once its turn has come: None at the end, or what reading it raised."""
    try:
        item, batch = next(items)
        started = copier.start(batch)
    except StopIteration:
        return lambda: None
    except Exception as error:  # whatever it is, it belongs after the batch that is handed out before it
        return _make_raiser(error)
    return lambda: (item, started)


def _make_raiser(error: Exception) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it
