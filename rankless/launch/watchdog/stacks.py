"""The stacks of a worker, and of processes that it has forked: asked for by a signal, read from shared memory."""

import os
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rankless.launch.watchdog.process_stats import read_process_stats
from rankless.records.worker_status import NAME, PAGE_BYTES, asking_signal, read_page

RESPONSE_TIMEOUT_SECONDS = 1.0
"""For one process's answer."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+) ")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """One call."""

    file: str
    line: int
    function: str


def parse_main_stack(text: str, main_thread: int) -> list[Frame]:
    """The frames of the main thread, innermost first, from what the fault handler has written."""
    stacks: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = stacks.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    return stacks.get(main_thread) or frames


class StackRequest:
    """The stacks of one worker, being asked for; of further processes of its, one after the other."""

    def __init__(self, process_id: int, descriptor: int, now: float) -> None:
        self._descriptor = descriptor
        self._queue: deque[int] = deque()
        self._current: int | None = None
        self._requested_at = now
        self._length = 0
        self.stacks: dict[int, str] = {}
        """By process; those that could not be asked, or did not answer, are missing."""
        self.add([process_id], now)

    def add(self, process_ids: Sequence[int], now: float) -> None:
        """Ask these, too."""
        self._queue.extend(process_ids)
        if self._current is None:
            self._request_next(now)

    def is_complete(self, now: float) -> bool:
        """Whether nothing more is to be expected."""
        if self._current is None:
            return True
        text = os.pread(self._descriptor, 1 << 20, PAGE_BYTES)
        # A stack comes in many small pieces: it is whole when nothing has been added since the last look.
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
                    os.kill(process_id, asking_signal() or 0)
                    self._current, self._requested_at = process_id, now


def _can_respond(process_id: int, descriptor: int) -> bool:
    """Whether it has our handler, and our memory under the number that the handler writes to: the signal would end any
    other program.
    """
    number, stats = asking_signal(), read_process_stats(process_id)
    if number is None or stats is None or stats.state in "tTZX" or not stats.caught_signals >> (number - 1) & 1:
        return False
    try:
        return NAME in os.readlink(f"/proc/{process_id}/fd/{descriptor}")
    except OSError:
        return False
