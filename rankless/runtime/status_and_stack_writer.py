"""A worker's status for the watchdog: it counts its training steps, and writes its stacks on request.

Note [stacks of running threads]: the interpreter's fault handler reads stacks in C, without the interpreter's lock.
Where another thread runs, its frames end meanwhile, and the process is killed for reading memory that is gone. So a
thread takes the lock to write the stacks of all threads. It waits for requests in a pipe, which costs nothing. A
library that keeps the lock and never returns keeps it from answering. Then the agent sends a signal, on which the fault
handler writes the stack of the thread that the signal has interrupted only: the main thread's. Even that one may not
run: where it returns from a function, it gives the memory of the frame back to the kernel before it forgets the frame,
and the kernel delivers signals at the end of that very call. So the agent sends the signal only while the main thread
sleeps, and to a process that does not answer otherwise: the signal cuts short a sleep in C that ignores EINTR. Of a
library that keeps the lock and computes there is no stack.
"""

import _thread
import faulthandler
import mmap
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from rankless.records.main_thread_time_in_collectives import COLLECTIVE_TIME
from rankless.records.shared_record import RecordWriter
from rankless.records.worker_status import (
    COLLECTIVE_NANOSECONDS,
    DESCRIPTOR,
    JOB_STEPS,
    LAST_STEP,
    MAIN_THREAD,
    MILLISAMPLES_PER_SECOND,
    PAGE_BYTES,
    PLACE_BYTES,
    PLACE_REQUEST,
    PLACE_START,
    REQUEST_PIPE,
    REQUESTS,
    STACKS_REQUEST,
    STEP_TIMES,
    STEPS,
    STEPS_KEPT,
    TIMED_NANOSECONDS,
    TIMED_SAMPLES,
    stack_dump_signal,
)
from rankless.runtime.fork_replacement import IN_REPLACEMENT

MAX_FRAMES = 100
"""The frames of a thread that are written, from the innermost one, as by the fault handler."""


def publish_totals(descriptor: int) -> Callable[[int, int, int, float], None]:
    """Return a function that publishes figures of the training in the page at `descriptor`.

    It takes job steps, timed samples, timed nanoseconds, and the samples per second over the last seconds.
    """
    fields = memoryview(mmap.mmap(descriptor, PAGE_BYTES)).cast("Q")

    def publish(job_steps: int, timed_samples: int, timed_nanoseconds: int, samples_per_second: float) -> None:
        fields[JOB_STEPS], fields[TIMED_SAMPLES], fields[TIMED_NANOSECONDS] = (
            job_steps,
            timed_samples,
            timed_nanoseconds,
        )
        fields[MILLISAMPLES_PER_SECOND] = round(samples_per_second * 1e3)

    return publish


def publish_status(descriptor: int, *, main_thread: int) -> Callable[..., None]:
    """Publish this worker's status in the page at `descriptor` from now on.

    A DataLoader's workers, which this process forks, write the stack of their main thread on the signal.

    Returns:
        The function to call after each training step.
    """
    os.set_inheritable(descriptor, False)
    memory = memoryview(mmap.mmap(descriptor, PAGE_BYTES))
    fields, place = memory.cast("Q"), RecordWriter(memory[PLACE_START : PLACE_START + PLACE_BYTES])
    fields[MAIN_THREAD], fields[DESCRIPTOR] = main_thread, descriptor

    def serve_requests(_config: object = None) -> None:
        fields[REQUESTS] = requests = _start_stack_writer(descriptor, main_thread, place)
        fields[REQUEST_PIPE] = os.fstat(requests).st_ino

    serve_requests()
    IN_REPLACEMENT.call(serve_requests)
    number, clock = stack_dump_signal(), time.monotonic_ns
    if number is not None:
        faulthandler.register(number, file=descriptor, all_threads=False)

    def count_step(*_arguments: Any) -> None:
        now, count = clock(), fields[STEPS] + 1
        fields[STEP_TIMES + count % STEPS_KEPT] = fields[LAST_STEP] = now
        fields[COLLECTIVE_NANOSECONDS] = COLLECTIVE_TIME.nanoseconds
        fields[STEPS] = count

    return count_step


def _start_stack_writer(descriptor: int, main_thread: int, place: RecordWriter) -> int:
    """Write the place and the stacks to the file at `descriptor`, after the status, on each request.

    Returns:
        The descriptor of the pipe that takes requests.
    """
    requests, asks = os.pipe()
    # Not `threading`: scripts count the threads that it lists.
    _thread.start_new_thread(_write_on_requests, (requests, descriptor, main_thread, place))
    return asks


def _write_on_requests(requests: int, descriptor: int, main_thread: int, place: RecordWriter) -> None:
    with suppress(OSError):  # the script has closed descriptors that are not its own
        while asked := os.read(requests, 64):
            if STACKS_REQUEST in asked:
                os.pwrite(descriptor, format_stacks(without=_thread.get_ident()).encode(errors="replace"), PAGE_BYTES)
            if PLACE_REQUEST in asked:
                # Without its outermost frames, if it is too long.
                place.write(format_main_stack(main_thread).encode(errors="replace")[: place.capacity])


def format_main_stack(main_thread: int) -> str:
    """Return the stack of the main thread, as the fault handler writes it; "" if that thread has ended."""
    frame = sys._current_frames().get(main_thread)
    return "" if frame is None else "\n".join(_format_thread(main_thread, frame)) + "\n"


def format_stacks(*, without: int) -> str:
    """Return the process's ID, and the stacks of all its threads but one, as the fault handler writes them.

    Args:
        without: The identity of the thread to leave out.
    """
    lines = [f"Process {os.getpid()}"]
    for thread, innermost in sys._current_frames().items():
        if thread == without:
            continue
        lines += _format_thread(thread, innermost)
    return "\n".join(lines) + "\n"


def _format_thread(thread: int, innermost: FrameType) -> list[str]:
    lines = [f"Thread 0x{thread:016x} (most recent call first):"]
    frame: FrameType | None = innermost
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        code, line = frame.f_code, frame.f_lineno or "???"
        lines.append(f'  File "{code.co_filename}", line {line} in {code.co_name}')
        frame = frame.f_back
    if frame is not None:
        lines.append("  ...")
    return lines
