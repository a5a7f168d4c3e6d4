"""A clock that a selector can wait on: Linux's timerfd, which Python offers from 3.13 on."""

import ctypes
import os
import time

_NANOSECONDS = 1_000_000_000


class _Span(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Span), ("value", _Span))


class Alarm:
    """Readable once the time is over that was set last."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._setting = _Setting()
        self._address = ctypes.byref(self._setting)

    def fileno(self) -> int:
        """What to select on."""
        descriptor: int = self._descriptor
        return descriptor

    def set(self, seconds: float) -> None:
        """Ring after so long, and not when it was set to before; 0 rings at once."""
        nanoseconds = max(1, int(seconds * _NANOSECONDS))
        self._setting.value.seconds, self._setting.value.nanoseconds = divmod(nanoseconds, _NANOSECONDS)
        self._libc.timerfd_settime(self._descriptor, 0, self._address, None)

    def clear(self) -> None:
        """It has been heard."""
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)
