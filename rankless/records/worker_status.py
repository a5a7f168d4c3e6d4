"""The status that a worker publishes in memory that it shares with its agent: its main thread, its training steps.

The place of its main thread and the stacks of all its threads follow in the same memory. The worker writes them on
request (`runtime.status_and_stack_writer`): the stacks for the watchdog of its agent, the place for `rankless status`.
"""

import os
import signal
import struct
import tempfile

import msgspec

PLACE_START = 4096
"""Where the page has the place of the main thread: a record of `records.shared_record`."""
PLACE_BYTES = 28672
PAGE_BYTES = PLACE_START + PLACE_BYTES
"""The size of status and place. The stacks follow them."""
STACKS_REQUEST = b"?"
"""What the pipe takes: a request for the stacks of all threads, which the watchdog of the run makes."""
PLACE_REQUEST = b"p"
"""A request for the stack of the main thread, as the place. Any number of processes may make it at once."""
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
    MILLISAMPLES_PER_SECOND,
    COLLECTIVE_NANOSECONDS,
) = range(11)
"""The fields of the page: the main thread's identity, the number of optimizer steps, the time of the last one
(`monotonic_ns`), and the worker's descriptor of the page, whose number may differ from the agent's. Then the calls of
the train job that is called most often, and samples and time of the steps that captured nothing; on rank 0 only. Then
the worker's descriptor of the pipe that takes requests for stacks, and the number of the pipe's inode; and a thousand
times the samples of all ranks per second over the last seconds, on rank 0 only. Then for how long the main thread had
been in collectives at the end of the last step.
"""
STEP_TIMES = 16
"""The first of `STEPS_KEPT` fields that have the times of the last steps, in the order of a ring."""
STEPS_KEPT = 16
_FIELDS = struct.Struct(f"={STEP_TIMES + STEPS_KEPT}Q")
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
    samples_per_second: float = 0.0
    """Of all ranks, over the last seconds before the last step; 0 if unknown."""
    collective_seconds: float = 0.0
    """For how long the main thread had been in collectives at the end of the last step."""
    step_times: tuple[float, ...] = ()
    """The times of the last steps, in seconds of `time.monotonic`, the earliest first."""


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
    fields = _FIELDS.unpack(os.pread(descriptor, _FIELDS.size, 0))
    return WorkerStatus(
        main_thread=fields[MAIN_THREAD],
        count=fields[STEPS],
        last=fields[LAST_STEP] / 1e9 if fields[STEPS] else None,
        descriptor=fields[DESCRIPTOR],
        job_steps=fields[JOB_STEPS],
        timed_samples=fields[TIMED_SAMPLES],
        timed_seconds=fields[TIMED_NANOSECONDS] / 1e9,
        requests=fields[REQUESTS],
        request_pipe=fields[REQUEST_PIPE],
        samples_per_second=fields[MILLISAMPLES_PER_SECOND] / 1e3,
        collective_seconds=fields[COLLECTIVE_NANOSECONDS] / 1e9,
        step_times=tuple(sorted(each / 1e9 for each in fields[STEP_TIMES:] if each)),
    )


def stack_dump_signal() -> int | None:
    """Return the signal on which a worker writes the stack of its main thread; None if there is none.

    Hardly any program uses it.
    """
    # Not SIGUSR1 or SIGUSR2: cluster managers send them before they end a job, and scripts handle them.
    return signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else None
