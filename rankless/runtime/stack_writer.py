"""Write the Python stacks of all threads when the agent asks for them.

Note [stacks of running threads]: the interpreter's fault handler reads stacks in C, without the interpreter's lock.
Where another thread runs, its frames end meanwhile, and the process is killed for reading memory that is gone. So a
thread takes the lock to write the stacks of all threads. It waits for requests in a pipe, which costs nothing. A
library that keeps the lock and never returns keeps it from answering. Then the agent sends a signal, on which the fault
handler writes the stack of the thread that the signal has interrupted only: the main thread's.
"""

import _thread
import os
import sys
from contextlib import suppress

from rankless.records.worker_status import PAGE_BYTES

MAX_FRAMES = 100
"""The frames of a thread that are written, from the innermost one, as by the fault handler."""


def start_stack_writer(descriptor: int) -> int:
    """Write the stacks to the file at `descriptor`, after the status, on each request.

    Returns:
        The descriptor of the pipe that takes requests: any byte is one.
    """
    requests, asks = os.pipe()
    # Not `threading`: scripts count the threads that it lists.
    _thread.start_new_thread(_write_on_requests, (requests, descriptor))
    return asks


def _write_on_requests(requests: int, descriptor: int) -> None:
    with suppress(OSError):  # the script has closed descriptors that are not its own
        while os.read(requests, 64):
            os.pwrite(descriptor, format_stacks(without=_thread.get_ident()).encode(errors="replace"), PAGE_BYTES)


def format_stacks(*, without: int) -> str:
    """Return the process's ID, and the stacks of all its threads but one, as the fault handler writes them.

    Args:
        without: The identity of the thread to leave out.
    """
    lines = [f"Process {os.getpid()}"]
    for thread, innermost in sys._current_frames().items():
        if thread == without:
            continue
        lines.append(f"Thread 0x{thread:016x} (most recent call first):")
        frame, count = innermost, 0
        while frame is not None and count < MAX_FRAMES:
            code, line = frame.f_code, frame.f_lineno or "???"
            lines.append(f'  File "{code.co_filename}", line {line} in {code.co_name}')
            frame, count = frame.f_back, count + 1
        if frame is not None:
            lines.append("  ...")
    return "\n".join(lines) + "\n"
