"""Linux's means against processes that outlive a job: the parent-death signal, the subreaper and the tree in /proc.

On other systems the first two do nothing. There only the end of file on the control pipe ends a job.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]  # it has no stubs

_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send this process signal `number` when the thread that started it ends."""
    _process_control(_SET_PARENT_DEATH_SIGNAL, number)


def end_with_parent(parent_id: int) -> None:
    """Let this process be killed when its parent ends, and end it now if that has happened."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_id:
        sys.exit(f"the parent process {parent_id} has ended")


def delay_interrupts() -> None:
    """Keep SIGINT pending in this process and in its children, until one calls `allow_interrupts`.

    A worker inherits this from its fork server. An interrupt during its set-up then reaches the script's first line,
    where the worker reports it like any other exception.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def allow_interrupts() -> None:
    """Receive SIGINT from now on. Raises KeyboardInterrupt if one has been pending."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Within the context, delay SIGINT for this thread, and for good in the processes that it starts.

    A Ctrl-C could otherwise end a new process before it leaves the terminal's process group.
    """
    delay_interrupts()
    try:
        yield
    finally:
        allow_interrupts()


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process the parent of descendants whose own parent ends, so that it can end daemons too."""
    _process_control(_SET_CHILD_SUBREAPER, int(adopt))


def send_signal(process_id: int, number: int) -> None:
    """Send a signal to a process, which may be gone, and continue the process if it is stopped."""
    for each in (number, signal.SIGCONT):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process_id, each)


def descendants(process_id: int | None = None) -> frozenset[int]:
    """Return the ids of all descendants of a process, by default of this one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return frozenset(child.pid for child in psutil.Process(process_id).children(recursive=True))
    return frozenset()


class EndedChild(NamedTuple):
    """A child process that has ended."""

    process_id: int
    status: int
    """As `os.waitpid` returns it."""
    peak_memory_bytes: int
    """The largest resident set of the process, or of one of its own children."""


def reap_child(process_id: int = -1) -> EndedChild | None:
    """Return a child that has ended, by default any; None if it runs. Raises ChildProcessError if there is none."""
    ended, status, usage = os.wait4(process_id, os.WNOHANG)
    unit = 1 if sys.platform == "darwin" else 1024
    return EndedChild(ended, status, usage.ru_maxrss * unit) if ended else None


def end_descendants(*, deadline_seconds: float, spare: frozenset[int] = frozenset()) -> list[EndedChild]:
    """Kill all descendants of this process except `spare`.

    Stops them first, so that none forks another while it is being killed.

    Returns:
        Each child that has ended.
    """
    ended: list[EndedChild] = []
    deadline = time.monotonic() + deadline_seconds
    while time.monotonic() < deadline:
        tree = [child for child in psutil.Process().children(recursive=True) if child.pid not in spare]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for child in tree:
                with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
                    child.send_signal(number)
        for child in tree:
            with contextlib.suppress(ChildProcessError):
                found = reap_child(child.pid)
                if found is not None:
                    ended.append(found)
        if not tree:
            break
        time.sleep(0.002)
    return ended


def thread_count() -> int:
    """Return how many threads this process has, including those of C libraries."""
    return int(psutil.Process().num_threads())


def _process_control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
