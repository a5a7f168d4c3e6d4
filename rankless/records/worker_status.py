"""What a worker writes down while it runs, in memory that its agent shares: its main thread, its training steps.

Behind it, in the same memory, stands what it writes on request: the stacks of all its threads (`runtime.stack_dump`).
"""

import os
import signal
import struct
import tempfile

import msgspec

PAGE_BYTES = 4096
"""Stacks follow from here on."""
MAIN_THREAD, STEPS, LAST_STEP, DESCRIPTOR = range(4)
"""The page's words: the main thread's identity, training steps made, when the last one was (`monotonic_ns`), and under
which descriptor the worker writes, which may be another than its agent's.
"""
_WORDS = struct.Struct("=4Q")
NAME = "rankless-whereabouts"


class WorkerStatus(msgspec.Struct, frozen=True):
    """What a worker's page says."""

    main_thread: int
    count: int
    last: float | None
    """When the last one was made, in seconds of `time.monotonic`; None before the first."""
    descriptor: int = 0
    """The page's own, in the worker."""


def open_page() -> int:
    """The descriptor of a new page."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(NAME)
    else:
        with tempfile.TemporaryFile(prefix=NAME) as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, PAGE_BYTES)
    os.lseek(descriptor, PAGE_BYTES, os.SEEK_SET)
    return descriptor


def read_page(descriptor: int) -> WorkerStatus:
    """What the worker has written so far."""
    main_thread, count, last, own = _WORDS.unpack(os.pread(descriptor, _WORDS.size, 0))
    return WorkerStatus(main_thread, count, last / 1e9 if count else None, own)


def stack_dump_signal() -> int | None:
    """The signal on which a worker writes its stacks: one that hardly any program uses. None where there are none."""
    # Not SIGUSR1 or SIGUSR2: cluster managers send them before they end a job, and scripts heed that.
    return signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else None
