"""Lets one thread at a time make progress on a rank's operations: a background thread, or a thread that waits.

Note [one driver]: only the holder of `_driving` receives messages and executes batches. By default this is the
background thread. A thread that waits for a result drives the loop itself, so no result passes from one thread to
another. The background thread waits on `_selector`, which contains `connections` while the thread listens. A waiting
thread takes `connections` out, and sets the timer when it has finished. Otherwise the background thread would wake at
every message of a script that runs one operation after the other, and compete with it.
"""

import ctypes
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rankless.extensions.horovod.engine.pending_operations import PendingOperation

SWITCH_SECONDS = 2e-4
"""Python's switch interval while the loop exists. With the default of 5 ms, a busy main thread starves the other."""
JOIN_SECONDS = 10.0
WAITING_SECONDS = 0.25
"""How often a waiting thread calls `on_waiting`."""
IDLE_SECONDS = 1e-3
"""How long the background thread stays away after another thread has driven the loop: it often comes back at once."""


class ProgressLoop:
    """Calls `step` until nothing is left to do, in one thread at a time.

    Args:
        connections: The connections whose messages `step` receives. The loop closes the selector.
        step: Receives messages and executes one batch. Returns whether there was a batch.
        has_work: Whether batches are queued or operations pending. Called with `changed` held.
        poll_seconds: How long to wait for messages at most.
        on_waiting: Called now and then with the operation for which a thread waits.
        changed: Notified whenever an operation completes. Its lock guards the operations.
    """

    def __init__(
        self,
        connections: selectors.EpollSelector,
        *,
        step: Callable[[], bool],
        has_work: Callable[[], bool],
        poll_seconds: Callable[[], float],
        on_waiting: Callable[[PendingOperation], None],
        changed: threading.Condition,
    ) -> None:
        self.is_listening = False
        """Whether the background thread wakes when a message arrives."""
        self._connections = connections
        self._step = step
        self._has_work = has_work
        self._poll_seconds = poll_seconds
        self._on_waiting = on_waiting
        self._changed = changed
        self._driving = threading.Lock()
        self._is_stopped = False
        self._selector = selectors.EpollSelector()
        self._timer = Timer()
        self._selector.register(self._timer, selectors.EVENT_READ)
        self._switch_seconds = sys.getswitchinterval()
        self._thread = threading.Thread(target=self._run, name="rankless-horovod", daemon=True)

    def start(self) -> None:
        """Start the background thread."""
        sys.setswitchinterval(min(self._switch_seconds, SWITCH_SECONDS))
        self._thread.start()

    def wake(self, after_seconds: float = 0.0) -> None:
        """Wake the background thread after a delay, which replaces the delay set before."""
        self._timer.set(after_seconds)

    def run_until_done(self, operation: PendingOperation) -> None:
        """Return once the operation has its results or its error."""
        while not operation.is_done:
            if self._driving.acquire(blocking=False):
                with self._drive_here():
                    while not operation.is_done:
                        if not self._step() and not operation.is_done:
                            self._connections.select(min(self._poll_seconds(), WAITING_SECONDS))
                            self._on_waiting(operation)
            else:
                with self._changed:
                    self._changed.wait_for(
                        lambda: operation.is_done or not self._driving.locked(), timeout=WAITING_SECONDS
                    )
                self._on_waiting(operation)

    def stop(self) -> None:
        """Make the background thread end at its next wake-up. The lock of `changed` is held."""
        self._is_stopped = True

    def close(self) -> None:
        """Wait for the background thread after `stop`, and restore the switch interval."""
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)
        if sys.getswitchinterval() == min(self._switch_seconds, SWITCH_SECONDS):
            sys.setswitchinterval(self._switch_seconds)

    def close_files(self) -> None:
        """Close the selectors and the timer."""
        self._selector.close()
        self._connections.close()
        self._timer.close()

    def _run(self) -> None:
        """The background thread."""
        while not self._is_stopped:
            self._selector.select(self._poll_seconds())
            self._timer.clear()
            if not self._is_stopped and self._driving.acquire(blocking=False):
                try:
                    self._listen()
                    while self._step():
                        pass
                finally:
                    self._driving.release()
                    with self._changed:
                        self._changed.notify_all()

    def _listen(self) -> None:
        """Let messages wake the background thread from now on. `_driving` is held."""
        if not self.is_listening:
            self.is_listening = True
            self._selector.register(self._connections.fileno(), selectors.EVENT_READ)

    @contextmanager
    def _drive_here(self) -> Iterator[None]:
        """Stop the background thread from listening, inside and for a while after. Releases `_driving` at the end."""
        if self.is_listening:
            self.is_listening = False
            self._selector.unregister(self._connections.fileno())
        try:
            yield
        finally:
            self._driving.release()
            with self._changed:
                self._changed.notify_all()
                if not self._is_stopped:
                    self._timer.set(0 if self._has_work() else IDLE_SECONDS)


_NANOSECONDS = 1_000_000_000


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Timer:
    """Becomes readable when the time set last has passed."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._setting = _TimerSpec()
        self._address = ctypes.byref(self._setting)

    def fileno(self) -> int:
        """Return the file descriptor to select on."""
        descriptor: int = self._descriptor
        return descriptor

    def set(self, seconds: float) -> None:
        """Expire after a delay, or at once for 0. It replaces the delay set before."""
        nanoseconds = max(1, int(seconds * _NANOSECONDS))
        self._setting.value.seconds, self._setting.value.nanoseconds = divmod(nanoseconds, _NANOSECONDS)
        self._libc.timerfd_settime(self._descriptor, 0, self._address, None)

    def clear(self) -> None:
        """Acknowledge the expiry."""
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close the file descriptor."""
        os.close(self._descriptor)
