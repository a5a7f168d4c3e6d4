"""Linux's means against processes that outlive a job: the parent-death signal, the subreaper and the tree in /proc.

On other systems the first two do nothing. There only the end of file on the control pipe ends a job.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time

import psutil  # type: ignore[import-untyped]  # it has no stubs

_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send this process signal `number` when the thread that started it ends."""
    _process_control(_SET_PARENT_DEATH_SIGNAL, number)


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


def end_descendants(*, deadline_seconds: float, spare: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
    """Kill all descendants of this process except `spare`.

    Stops them first, so that none forks another while it is being killed.

    Returns:
        The process id and the wait status of each child that has ended.
    """
    ended: list[tuple[int, int]] = []
    deadline = time.monotonic() + deadline_seconds
    while time.monotonic() < deadline:
        tree = [child for child in psutil.Process().children(recursive=True) if child.pid not in spare]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for child in tree:
                with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
                    child.send_signal(number)
        for child in tree:
            with contextlib.suppress(ChildProcessError):
                process_id, status = os.waitpid(child.pid, os.WNOHANG)
                if process_id:
                    ended.append((process_id, status))
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
