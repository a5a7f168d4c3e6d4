"""Run a function in a forked child: one that crashes or hangs ends the child alone."""

import contextlib
import gc
import os
import select
import signal
import time
from collections.abc import Callable

import torch

MAX_ANSWER = 1 << 16
"""Largest answer, in bytes."""


def run_in_child(function: Callable[[], bytes], seconds: float) -> bytes | None:
    """Return what a function returns in a child of this process, or None if it fails or takes too long.

    The child computes with one thread, because those of its parent do not exist in it. It prints nothing, and frees
    nothing that its parent owns.

    Args:
        function: Returns at most `MAX_ANSWER` bytes. It must not use an accelerator, which a child cannot.
        seconds: How long it may take.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            _become_child(seconds)
            os.write(writer, function()[:MAX_ANSWER])
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    try:
        return _read_answer(reader, seconds)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _become_child(seconds: float) -> None:
    gc.disable()
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + 1)  # should the parent end first
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silent, descriptor)
    torch.set_num_threads(1)


def _read_answer(reader: int, seconds: float) -> bytes | None:
    deadline, answer = time.monotonic() + seconds, b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        data = os.read(reader, MAX_ANSWER)
        if not data:
            return answer or None
        answer += data
