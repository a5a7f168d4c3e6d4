"""Collect Python stacks of workers and their child processes. Shared memory returns them.

A thread of the worker writes them. A worker whose thread does not answer gets a signal, and so does a child process:
only while its main thread sleeps, because the signal could kill one that runs. See Note [stacks of running threads] in
`runtime.status_and_stack_writer`.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rankless.launch.watchdog.process_activity import read_process_stats
from rankless.records.worker_status import (
    NAME,
    PAGE_BYTES,
    STACKS_REQUEST,
    WorkerStatus,
    read_page,
    stack_dump_signal,
)

RESPONSE_TIMEOUT_SECONDS = 1.0
"""For the stacks of one process."""
TRACEBACK_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
"""A frame of a traceback, as Python prints it."""
_PROCESS = re.compile(r"Process (\d+)\n")
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+) ")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """One frame of a Python stack."""

    file: str
    line: int
    function: str


def parse_main_stack(text: str, main_thread: int) -> list[Frame]:
    """Return the frames of the main thread, innermost first, from the stacks of all threads, or from its own."""
    stacks: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = stacks.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    return stacks.get(main_thread) or frames


def parse_traceback(text: str) -> list[Frame]:
    """Return the frames of a traceback, outermost first."""
    return [Frame(file, int(line), function) for file, line, function in TRACEBACK_FRAME.findall(text)]


class StackRequest:
    """A request for the stacks of one worker and, one after the other, of its child processes."""

    def __init__(self, process_id: int, descriptor: int, now: float) -> None:
        self._descriptor = descriptor
        self._queue: deque[tuple[int, Callable[[int], bool]]] = deque()
        self._current: int | None = None
        self._sleep: int | None = None
        """Which sleep of the main thread the process is in that waits for the signal; -1 if it has run last."""
        self._requested_at = now
        self._length = 0
        self.stacks: dict[int, str] = {}
        """Stacks by process ID, without the processes that cannot respond or did not respond in time."""
        self._queue.append((process_id, self._ask_thread))
        self.add([process_id], now)

    def add(self, process_ids: Sequence[int], now: float) -> None:
        """Request the stacks of further processes, by the signal."""
        self._queue.extend((process_id, self._prepare_signal) for process_id in process_ids)
        if self._current is None:
            self._request_next(now)

    def is_complete(self, now: float) -> bool:
        """Return True once every process has responded or timed out."""
        if self._current is None:
            return True
        if self._sleep is not None:
            self._send_signal_in_sleep(self._current)
        text = self._read_stacks(self._current)
        # faulthandler writes many small pieces: the stack is complete once it has not grown since the last check.
        if text and len(text) == self._length and text.endswith("\n"):
            self.stacks[self._current] = text
            self._request_next(now)
        elif now - self._requested_at > RESPONSE_TIMEOUT_SECONDS:
            self._request_next(now)
        self._length = len(text) if self._current is not None else 0
        return self._current is None

    def _read_stacks(self, process_id: int) -> str:
        """Return what a process has written; "" for a late answer of another one."""
        text = os.pread(self._descriptor, 1 << 20, PAGE_BYTES).decode(errors="replace")
        writer = _PROCESS.match(text)
        return text if writer is None or int(writer[1]) == process_id else ""

    def _request_next(self, now: float) -> None:
        self._current, self._sleep, self._length = None, None, 0
        while self._queue and self._current is None:
            process_id, ask = self._queue.popleft()
            if process_id in self.stacks:
                continue
            os.ftruncate(self._descriptor, PAGE_BYTES)
            os.lseek(self._descriptor, PAGE_BYTES, os.SEEK_SET)
            if ask(process_id):
                self._current, self._requested_at = process_id, now

    def _ask_thread(self, process_id: int) -> bool:
        """Ask the thread of a worker that writes stacks. Return whether that was possible."""
        return ask_thread(process_id, read_page(self._descriptor), STACKS_REQUEST)

    def _prepare_signal(self, process_id: int) -> bool:
        """Note that a process gets the signal once its main thread sleeps. Return whether it has the handler."""
        if not _can_respond(process_id, read_page(self._descriptor).descriptor):
            return False
        self._sleep = -1
        return True

    def _send_signal_in_sleep(self, process_id: int) -> None:
        """Send a process the signal for its stack if its main thread is in the same sleep as at the last look."""
        stats, before = read_process_stats(process_id), self._sleep
        # Not "D": the kernel returns memory for a thread in that state too, and the signal would arrive thereafter.
        self._sleep = stats.context_switches if stats is not None and stats.state == "S" else -1
        if before != self._sleep or before == -1:
            return
        self._sleep = None
        if _can_respond(process_id, read_page(self._descriptor).descriptor):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process_id, stack_dump_signal() or 0)


def ask_thread(process_id: int, page: WorkerStatus, request: bytes) -> bool:
    """Send a request to the thread of a worker that writes stacks. Return whether that was possible.

    Args:
        process_id: The worker.
        page: Its status.
        request: `STACKS_REQUEST`, for the agent of the run only, or `PLACE_REQUEST`.
    """
    pipe = f"/proc/{process_id}/fd/{page.requests}"
    try:
        if not _has_page(process_id, page.descriptor) or os.stat(pipe).st_ino != page.request_pipe:
            return False
        requests = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(requests, request)
    except OSError:  # it is full: the thread has not answered for long
        return False
    finally:
        os.close(requests)
    return True


def _can_respond(process_id: int, descriptor: int) -> bool:
    """Return whether a process has Rankless's signal handler and shared memory: the signal would kill any other."""
    number, stats = stack_dump_signal(), read_process_stats(process_id)
    if number is None or stats is None or stats.state in "tTZX" or not stats.caught_signals >> (number - 1) & 1:
        return False
    return _has_page(process_id, descriptor)


def _has_page(process_id: int, descriptor: int) -> bool:
    """Return whether a process still has Rankless's shared memory: its script may have closed it."""
    try:
        return NAME in os.readlink(f"/proc/{process_id}/fd/{descriptor}")
    except OSError:
        return False
