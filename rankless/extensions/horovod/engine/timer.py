"""A timer that a selector can wait on: Linux's timerfd, which Python itself offers from 3.13 on."""

import ctypes
import os
import time

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
