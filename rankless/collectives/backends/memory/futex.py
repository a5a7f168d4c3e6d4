"""Sleeping on a 32-bit word of shared memory until another process changes it: Linux's futex, called through ctypes."""

import ctypes
from typing import Any

_WAIT, _WAKE, _EVERY_WAITER = 0, 1, 0x7FFFFFFF
_NANOSECONDS = 1_000_000_000
_WORDS = ctypes.c_long * 2  # struct timespec


class Futex:
    """The two operations of a futex, on words at given addresses.

    Args:
        number: The number of the system call `futex`.
    """

    def __init__(self, number: int) -> None:
        arguments: list[Any] = [
            *(ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_ulong),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong),
        ]
        self._number = number
        self._sleep = ctypes.CDLL(None).syscall
        # Waking is short. Without the interpreter's lock it could take 5 ms to get it back from a busy thread.
        self._wake = ctypes.PyDLL(None).syscall
        self._sleep.argtypes = self._wake.argtypes = arguments

    def wait(self, address: int, expected: int, timeout_seconds: float) -> None:
        """Sleep until `wake` is called for the address, a signal arrives, or the timeout has passed.

        Args:
            address: The address of a 32-bit word.
            expected: Returns at once if the word has another value.
            timeout_seconds: The longest sleep.
        """
        nanoseconds = max(0, int(timeout_seconds * _NANOSECONDS))
        time = _WORDS(nanoseconds // _NANOSECONDS, nanoseconds % _NANOSECONDS)
        self._sleep(self._number, address, _WAIT, expected, ctypes.addressof(time), None, 0)

    def wake(self, address: int) -> None:
        """Wake every thread of every process that sleeps on the word at the address."""
        self._wake(self._number, address, _WAKE, _EVERY_WAITER, None, None, 0)
