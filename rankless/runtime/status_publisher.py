"""A worker's status for the watchdog: it counts its training steps, and writes its stacks on request.

See Note [stacks of running threads] in `stack_writer`. The signal cuts short a sleep in C that ignores EINTR, so the
agent sends it only if a rank has been idle for long and does not answer otherwise.
"""

import faulthandler
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

from rankless.records.worker_status import (
    DESCRIPTOR,
    JOB_STEPS,
    LAST_STEP,
    MAIN_THREAD,
    PAGE_BYTES,
    REQUEST_PIPE,
    REQUESTS,
    STEPS,
    TIMED_NANOSECONDS,
    TIMED_SAMPLES,
    stack_dump_signal,
)
from rankless.runtime.stack_writer import start_stack_writer


def publish_totals(descriptor: int) -> Callable[[int, int, int], None]:
    """Return a function that publishes job steps, timed samples and timed nanoseconds in the page at `descriptor`."""
    fields = memoryview(mmap.mmap(descriptor, PAGE_BYTES)).cast("Q")

    def publish(job_steps: int, timed_samples: int, timed_nanoseconds: int) -> None:
        fields[JOB_STEPS], fields[TIMED_SAMPLES], fields[TIMED_NANOSECONDS] = (
            job_steps,
            timed_samples,
            timed_nanoseconds,
        )

    return publish


def publish_status(descriptor: int, *, main_thread: int) -> Callable[..., None]:
    """Publish this worker's status in the page at `descriptor` from now on.

    A DataLoader's workers, which this process forks, write the stack of their main thread on the signal.

    Returns:
        The function to call after each training step.
    """
    os.set_inheritable(descriptor, False)
    fields = memoryview(mmap.mmap(descriptor, PAGE_BYTES)).cast("Q")
    fields[MAIN_THREAD], fields[DESCRIPTOR] = main_thread, descriptor
    fields[REQUESTS] = requests = start_stack_writer(descriptor)
    fields[REQUEST_PIPE] = os.fstat(requests).st_ino
    number, clock = stack_dump_signal(), time.monotonic_ns
    if number is not None:
        faulthandler.register(number, file=descriptor, all_threads=False)

    def count_step(*_arguments: Any) -> None:
        fields[LAST_STEP] = clock()
        fields[STEPS] += 1

    return count_step
