"""The order of a group's operations, the thread that runs asynchronous ones, and the `Work` that callers wait for.

Note [who runs an operation]: operations run one at a time, in the order in which they were started. A synchronous one
runs in the caller's thread if nothing is queued, because handing it to a thread takes ten times as long. Asynchronous
ones are queued. The group's thread runs them, and so does a caller that waits: it runs what is queued before its own
operation, and then its own, unless the thread is faster.

Note [callbacks]: callbacks of a future run in the thread that has run its operation, and may wait for operations that
are started later. So another thread is started for these when all threads of the group are in callbacks.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from rankless.errors import CollectiveError
from rankless.records.main_thread_time_in_collectives import COLLECTIVE_TIME

Outputs = list[Any]


class SharedMemoryWork(dist.Work):
    """An operation that has been started: torch's interface of what a caller waits for.

    Args:
        outputs: The tensors that the operation writes, the value of its future.
        drive: Called with this work and a point in time by `wait`: it makes the operation go on, and returns when it
            is done or, if that is not None, at the time. None for an operation that is done.
    """

    def __init__(
        self, outputs: Outputs, drive: Callable[["SharedMemoryWork", float | None], None] | None = None
    ) -> None:
        super().__init__()
        self._outputs, self._drive = outputs, drive
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Outputs] | None = None
        self._end: torch.futures.Future[None] | None = None
        self._lock = threading.Lock()
        self.source = -1
        self.is_done = drive is None
        self.done = threading.Lock()
        """Locked until the operation is done."""
        if not self.is_done:
            self.done.acquire()

    def finish(
        self,
        error: BaseException | None = None,
        in_callbacks: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Mark the operation as done or failed, and complete its future if it was asked for.

        Args:
            error: Why it has failed.
            in_callbacks: Makes a context in which the callbacks of the future run.
        """
        with self._lock:
            self._error, self.is_done, self._drive = error, True, None
            end = self._end
        self.done.release()
        if end is not None:
            with in_callbacks():
                end.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the operation is done.

        Args:
            timeout: How long to wait. Default: as long as the operation takes; the group's timeout ends it.

        Raises:
            CollectiveError: The operation failed, or is not done within the timeout. It then still goes on.
        """
        self._wait_until_done(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _wait_until_done(self, timeout: timedelta | None) -> None:
        # Not in `wait`: the traceback of an operation's error would keep `drive`, and with it the group's memory.
        drive = self._drive
        if drive is None:
            return
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        drive(self, time.monotonic() + seconds if seconds > 0 else None)
        if not self.is_done:
            raise CollectiveError(
                expected=f"the operation to be done within {seconds:g} s",
                found="it is not",
                fix="wait longer, or see which rank does not take part",
            )

    def is_completed(self) -> bool:
        """Return whether the operation is done or has failed."""
        return self.is_done

    def is_success(self) -> bool:
        """Return whether the operation is done and has not failed."""
        return self.is_done and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of a failed operation."""
        return self._error

    def synchronize(self) -> None:
        """Wait for the operation."""
        self.wait()

    def result(self) -> Outputs:
        """Return the tensors that the operation writes."""
        return self._outputs

    def source_rank(self) -> int:
        """Return the sender of a received message, as a rank of the group; -1 for other operations."""
        return self.source

    def _source_rank(self) -> int:
        return self.source

    def get_future(self) -> torch.futures.Future[Outputs]:
        """Return a future of the tensors that the operation writes. Its callbacks may run in the group's thread.

        If the operation fails, `wait` and `value` of the future raise a `RuntimeError` with the error's text, as those
        of torch's own groups do.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            # A future of `then` fails for C++ code too. `Future.set_exception` makes the exception the value of the
            # future, and DistributedDataParallel's reducer then crashes, because it looks for a tensor in the value.
            end = self._end = torch.futures.Future()
            future = self._future = end.then(lambda _: self._take_outputs())
            is_done = self.is_done
        if is_done:
            end.set_result(None)
        return future

    def _take_outputs(self) -> Outputs:
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:
            raise RuntimeError(f"the operation was interrupted by {type(self._error).__name__}")
        return self._outputs


class OperationQueue:
    """Runs the operations of one group in order. See note [who runs an operation].

    Args:
        interrupt: Called if an operation is left by an exception that is not a `CollectiveError`.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._running = threading.Lock()
        self._queued: deque[tuple[SharedMemoryWork, Callable[[], None]]] = deque()
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._in_callbacks = 0
        """How many of the threads may run callbacks. See note [callbacks]."""
        self._count_lock = threading.Lock()
        self.count = 0
        """How many operations have been started."""

    def run(self, operation: Callable[[], None], outputs: Outputs) -> SharedMemoryWork:
        """Run an operation after all that were started before, and return its work, which is done.

        Raises:
            CollectiveError: The operation failed.
        """
        if self._running.acquire(blocking=False):
            try:
                if not self._queued:
                    self.count += 1
                    with COLLECTIVE_TIME:
                        self._execute(operation)
                    return SharedMemoryWork(outputs)
            finally:
                self._running.release()
        work = self.start(operation, outputs)
        work.wait()
        return work

    def start(self, operation: Callable[[], None], outputs: Outputs) -> SharedMemoryWork:
        """Queue an operation, and return its work."""
        work = SharedMemoryWork(outputs, self._drive)
        self.count += 1
        self._queued.append((work, operation))
        self._require_thread()
        self._wakes.put(True)
        return work

    def close(self) -> None:
        """Run what is queued, and end the threads."""
        with self._count_lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._wakes.put(False)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _require_thread(self) -> None:
        """Start a thread if all others may run callbacks."""
        if self._in_callbacks < len(self._threads):
            return
        with self._count_lock:
            if self._in_callbacks >= len(self._threads):
                thread = threading.Thread(target=self._serve, name="rankless-collectives", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _drive(self, work: SharedMemoryWork, deadline: float | None) -> None:
        """Run queued operations until one of them is done, or wait until the thread has run it."""
        if work.is_done:
            return
        with COLLECTIVE_TIME:
            while not work.is_done:
                if self._running.acquire(blocking=False):
                    self._run_next()
                    continue
                remaining = -1.0 if deadline is None else deadline - time.monotonic()
                if deadline is not None and remaining <= 0:
                    return
                if work.done.acquire(timeout=remaining):
                    work.done.release()

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        while self._wakes.get():
            self._running.acquire()
            self._run_next(self._may_run_callbacks)

    @contextmanager
    def _may_run_callbacks(self) -> Iterator[None]:
        """Let another thread serve the queue within the block. See note [callbacks]."""
        with self._count_lock:
            self._in_callbacks += 1
        if self._queued:
            self._require_thread()
        try:
            yield
        finally:
            with self._count_lock:
                self._in_callbacks -= 1

    def _run_next(self, in_callbacks: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Run the first queued operation, if there is one, and release the lock that the caller has acquired."""
        error: BaseException | None = None
        work = None
        try:
            if self._queued:
                work, operation = self._queued.popleft()
                self._execute(operation)
        except BaseException as raised:
            error = raised
        finally:
            self._running.release()
        # Without the lock: callbacks of the future may start operations.
        if work is not None:
            # The frames of a traceback would keep the group's memory.
            work.finish(error.with_traceback(None) if isinstance(error, CollectiveError) else error, in_callbacks)
        if error is not None and not isinstance(error, Exception):
            raise error

    def _execute(self, operation: Callable[[], None]) -> None:
        try:
            if torch._C._len_torch_dispatch_stack():
                # A mode of the script sees the collective, and not how it is done, as with other backends.
                with _disable_current_modes():
                    operation()
            else:
                operation()
        except CollectiveError:
            raise
        except BaseException:
            # The other ranks would wait for the rest of the operation.
            self._interrupt()
            raise
