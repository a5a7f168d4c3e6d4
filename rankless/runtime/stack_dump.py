"""A worker that can be found: it counts its training steps, and on a signal writes the stacks of all its threads.

# Note [stacks by signal]: the interpreter's own fault handler writes them, in C and without the interpreter's lock:
# also while the main thread waits in a collective, or holds the lock in a library that never returns. Nothing of
# PyTorch's is replaced, and nothing is paid until an agent asks. A sleep in C that does not heed EINTR is cut short by
# the question: so it is asked only when a rank has stood still for long.
"""

import faulthandler
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

from rankless.records.worker_status import DESCRIPTOR, LAST_STEP, MAIN_THREAD, PAGE_BYTES, STEPS, stack_dump_signal


def publish_status(descriptor: int, *, main_thread: int) -> Callable[..., None]:
    """Write into the page at `descriptor` from now on; returns what is to be called after each training step.

    A DataLoader's workers, forked from this process, can be asked for their stacks as it can.
    """
    os.set_inheritable(descriptor, False)
    words = memoryview(mmap.mmap(descriptor, PAGE_BYTES)).cast("Q")
    words[MAIN_THREAD], words[DESCRIPTOR] = main_thread, descriptor
    number, clock = stack_dump_signal(), time.monotonic_ns
    if number is not None:
        faulthandler.register(number, file=descriptor, all_threads=True)

    def step_made(*_arguments: Any) -> None:
        words[LAST_STEP] = clock()
        words[STEPS] += 1

    return step_made
