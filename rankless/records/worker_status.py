"""The status that a worker publishes in memory that it shares with its agent: its main thread, its training steps.

The stacks of all its threads follow in the same memory. The worker writes them on request (`runtime.status_publisher`).
"""

import os
import signal
import struct
import tempfile

import msgspec

PAGE_BYTES = 4096
"""The size of the status. The stacks follow it."""
(
    MAIN_THREAD,
    STEPS,
    LAST_STEP,
    DESCRIPTOR,
    JOB_STEPS,
    TIMED_SAMPLES,
    TIMED_NANOSECONDS,
    REQUESTS,
    REQUEST_PIPE,
) = range(9)
"""The fields of the page: the main thread's identity, the number of optimizer steps, the time of the last one
(`monotonic_ns`), and the worker's descriptor of the page, whose number may differ from the agent's. Then the calls of
the train job that is called most often, and samples and time of the steps that captured nothing; on rank 0 only. Then
the worker's descriptor of the pipe that takes requests for stacks, and the number of the pipe's inode.
"""
_FIELDS = struct.Struct("=9Q")
NAME = "rankless-worker-status"


class WorkerStatus(msgspec.Struct, frozen=True):
    """The content of a worker's page."""

    main_thread: int
    count: int
    last: float | None
    """The time of the last step, in seconds of `time.monotonic`, or None before the first."""
    descriptor: int = 0
    """The worker's descriptor of the page."""
    job_steps: int = 0
    timed_samples: int = 0
    timed_seconds: float = 0.0
    requests: int = 0
    """The worker's descriptor of the pipe that takes requests for stacks."""
    request_pipe: int = 0
    """The number of the pipe's inode."""


def open_page() -> int:
    """Open a new page, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(NAME)
    else:
        with tempfile.TemporaryFile(prefix=NAME) as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, PAGE_BYTES)
    os.lseek(descriptor, PAGE_BYTES, os.SEEK_SET)
    return descriptor


def read_page(descriptor: int) -> WorkerStatus:
    """Read the present status of a worker."""
    main_thread, count, last, own, job_steps, samples, timed, requests, pipe = _FIELDS.unpack(
        os.pread(descriptor, _FIELDS.size, 0)
    )
    last_step = last / 1e9 if count else None
    return WorkerStatus(main_thread, count, last_step, own, job_steps, samples, timed / 1e9, requests, pipe)


def stack_dump_signal() -> int | None:
    """Return the signal on which a worker writes the stack of its main thread; None if there is none.

    Hardly any program uses it.
    """
    # Not SIGUSR1 or SIGUSR2: cluster managers send them before they end a job, and scripts handle them.
    return signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else None
