"""The base classes of Horovod's data loaders. A script's loader defines `_iterate` and `__len__`."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

POLL_SECONDS = 0.1
"""How often a thread that cannot pass a batch on looks whether the loader was closed."""
END = object()
"""What the thread passes on at the end of an epoch."""


class BaseDataLoader:
    """Yields the batches of `_iterate`, each after `_process_batch`."""

    def __len__(self) -> int:
        """Return the number of batches. Derived classes define it."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of an epoch. Derived classes define it."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Return the batch that the loop gets. Trainers replace this method to reshape batches."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Reads batches in a thread, ahead of the loop. It stands before the loader: `class L(AsyncDataLoaderMixin, Base)`.

    Args:
        async_loader_queue_size: How many batches are read ahead. 0 reads in the loop itself. Default 5.
        args: Arguments of the loader after it.
        kwargs: Keyword arguments of the loader after it.
    """

    def __init__(self, async_loader_queue_size: int = 5, *args: Any, **kwargs: Any) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        super().__init__(*args, **kwargs)
        self.started = False
        self.finished_event = threading.Event()
        self.queue: queue.Queue[Any] = queue.Queue(async_loader_queue_size)
        self.thread = threading.Thread(target=self._async_worker, name="async-data-loader", daemon=True)

    def close_async_loader(self) -> None:
        """End the thread. Batches that were read ahead are lost."""
        self.finished_event.set()
        if self.started:
            self.thread.join()

    def _async_worker(self) -> None:
        """Read one epoch after the other until the loader is closed, or reading fails."""
        while not self.finished_event.is_set():
            try:
                for batch in self._iterate():  # type: ignore[attr-defined]  # the class after this one defines it
                    if not self._put(batch):
                        return
            except Exception as error:  # the loop raises it
                self._put(error)
                return
            self._put(END)

    def _put(self, item: Any) -> bool:
        """Pass an item to the loop. Returns False if the loader was closed before there was room."""
        while not self.finished_event.is_set():
            try:
                self.queue.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]  # the class after this one defines it
            return
        if not self.started:
            self.started = True
            self.thread.start()
        while (item := self._get()) is not END:
            if isinstance(item, Exception):
                raise item
            yield self._process_batch(item)  # type: ignore[attr-defined]  # as above

    def _get(self) -> Any:
        """Return the next item, or the end of the epoch if no item can come any more."""
        while True:
            try:
                return self.queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if not self.thread.is_alive() and self.queue.empty():
                    return END
