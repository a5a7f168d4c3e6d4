"""The stacks of a worker, and of processes that it has forked: asked for by a signal, read from shared memory."""

import os
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rankless.launch.watchdog.process_stats import vitals_of
from rankless.records.worker_status import NAME, PAGE_BYTES, asking_signal, read_page

PATIENCE_SECONDS = 1.0
"""For one process's answer."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+) ")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """One call."""

    file: str
    line: int
    function: str


def main_stack(text: str, main_thread: int) -> list[Frame]:
    """The frames of the main thread, innermost first, from what the fault handler has written."""
    stacks: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = stacks.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    return stacks.get(main_thread) or frames


class Question:
    """The stacks of one worker, being asked for; of further processes of its, one after the other."""

    def __init__(self, process_id: int, descriptor: int, now: float) -> None:
        self._descriptor = descriptor
        self._waiting: deque[int] = deque()
        self._asked: int | None = None
        self._asked_at = now
        self._length = 0
        self.answers: dict[int, str] = {}
        """By process; those that could not be asked, or did not answer, are missing."""
        self.ask([process_id], now)

    def ask(self, process_ids: Sequence[int], now: float) -> None:
        """Ask these, too."""
        self._waiting.extend(process_ids)
        if self._asked is None:
            self._ask_next(now)

    def is_answered(self, now: float) -> bool:
        """Whether nothing more is to be expected."""
        if self._asked is None:
            return True
        text = os.pread(self._descriptor, 1 << 20, PAGE_BYTES)
        # A stack comes in many small pieces: it is whole when nothing has been added since the last look.
        if text and len(text) == self._length and text.endswith(b"\n"):
            self.answers[self._asked] = text.decode(errors="replace")
            self._ask_next(now)
        elif now - self._asked_at > PATIENCE_SECONDS:
            self._ask_next(now)
        self._length = len(text) if self._asked is not None else 0
        return self._asked is None

    def _ask_next(self, now: float) -> None:
        self._asked, self._length = None, 0
        while self._waiting and self._asked is None:
            process_id = self._waiting.popleft()
            os.ftruncate(self._descriptor, PAGE_BYTES)
            os.lseek(self._descriptor, PAGE_BYTES, os.SEEK_SET)
            if _would_answer(process_id, read_page(self._descriptor).descriptor):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process_id, asking_signal() or 0)
                    self._asked, self._asked_at = process_id, now


def _would_answer(process_id: int, descriptor: int) -> bool:
    """Whether it has our handler, and our memory under the number that the handler writes to: the signal would end any
    other program.
    """
    number, vitals = asking_signal(), vitals_of(process_id)
    if number is None or vitals is None or vitals.state in "tTZX" or not vitals.catches >> (number - 1) & 1:
        return False
    try:
        return NAME in os.readlink(f"/proc/{process_id}/fd/{descriptor}")
    except OSError:
        return False
