"""Collect Python stacks of workers and their child processes. A signal requests them, shared memory returns them."""

import os
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rankless.launch.watchdog.process_stats import read_process_stats
from rankless.records.worker_status import NAME, PAGE_BYTES, read_page, stack_dump_signal

RESPONSE_TIMEOUT_SECONDS = 1.0
"""For the stacks of one process."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+) ")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """One frame of a Python stack."""

    file: str
    line: int
    function: str


def parse_main_stack(text: str, main_thread: int) -> list[Frame]:
    """Return the frames of the main thread, innermost first, from the output of `faulthandler`."""
    stacks: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = stacks.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    return stacks.get(main_thread) or frames


class StackRequest:
    """A request for the stacks of one worker and, one after the other, of its child processes."""

    def __init__(self, process_id: int, descriptor: int, now: float) -> None:
        self._descriptor = descriptor
        self._queue: deque[int] = deque()
        self._current: int | None = None
        self._requested_at = now
        self._length = 0
        self.stacks: dict[int, str] = {}
        """Stacks by process ID, without the processes that cannot respond or did not respond in time."""
        self.add([process_id], now)

    def add(self, process_ids: Sequence[int], now: float) -> None:
        """Request the stacks of further processes."""
        self._queue.extend(process_ids)
        if self._current is None:
            self._request_next(now)

    def is_complete(self, now: float) -> bool:
        """Return True once every process has responded or timed out."""
        if self._current is None:
            return True
        text = os.pread(self._descriptor, 1 << 20, PAGE_BYTES)
        # faulthandler writes many small pieces: the stack is complete once it has not grown since the last check.
        if text and len(text) == self._length and text.endswith(b"\n"):
            self.stacks[self._current] = text.decode(errors="replace")
            self._request_next(now)
        elif now - self._requested_at > RESPONSE_TIMEOUT_SECONDS:
            self._request_next(now)
        self._length = len(text) if self._current is not None else 0
        return self._current is None

    def _request_next(self, now: float) -> None:
        self._current, self._length = None, 0
        while self._queue and self._current is None:
            process_id = self._queue.popleft()
            os.ftruncate(self._descriptor, PAGE_BYTES)
            os.lseek(self._descriptor, PAGE_BYTES, os.SEEK_SET)
            if _can_respond(process_id, read_page(self._descriptor).descriptor):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process_id, stack_dump_signal() or 0)
                    self._current, self._requested_at = process_id, now


def _can_respond(process_id: int, descriptor: int) -> bool:
    """Return whether a process has Rankless's signal handler and shared memory: the signal would kill any other."""
    number, stats = stack_dump_signal(), read_process_stats(process_id)
    if number is None or stats is None or stats.state in "tTZX" or not stats.caught_signals >> (number - 1) & 1:
        return False
    try:
        return NAME in os.readlink(f"/proc/{process_id}/fd/{descriptor}")
    except OSError:
        return False
