"""What the workers of this host do while they have time to end, so that the summary names where they were cut off."""

import os
import time
from collections.abc import Sequence

from rankless.launch.watchdog.stack_classifier import classify_stack
from rankless.launch.watchdog.stacks import ask_thread, parse_main_stack
from rankless.records.events import AnyRecord, Exited, Started, WorkerCut
from rankless.records.worker_status import PAGE_BYTES, STACKS_REQUEST, read_page

_INTERVAL_SECONDS = 1.0
_MAX_STACK_BYTES = 1 << 20


class StoppingWorkers:
    """The workers that are alive, and about once a second the stack of each while they stop.

    A thread of the worker writes the stack. A worker without that thread gets no signal for it: it may be about to end.

    Args:
        ranks: The ranks of this host.
        pages: The descriptor of the memory that each of them shares with the agent; none without a watchdog.
    """

    def __init__(self, ranks: Sequence[int], pages: Sequence[int]) -> None:
        self._ranks = frozenset(ranks)
        self._pages = dict(zip(ranks, pages, strict=False))
        self._process_ids: dict[int, int] = {}
        self._next_look_at = 0.0
        self._is_asked = False
        self._doing: dict[int, str] = {}

    def receive(self, record: AnyRecord) -> None:
        """Take note of the start and of the end of a worker."""
        if record.rank not in self._ranks:
            return
        if isinstance(record, Started):
            self._process_ids[record.rank] = record.pid
        elif isinstance(record, Exited):
            self._process_ids.pop(record.rank, None)

    @property
    def have_started(self) -> bool:
        """Whether a worker is alive."""
        return bool(self._process_ids)

    def look(self, now: float) -> None:
        """Read the stacks that have been asked for and, if a second is over, ask again."""
        if now < self._next_look_at:
            return
        self._next_look_at = now + _INTERVAL_SECONDS
        self._read()
        for rank, process_id in self._process_ids.items():
            if rank in self._pages:
                page = self._pages[rank]
                os.ftruncate(page, PAGE_BYTES)
                os.lseek(page, PAGE_BYTES, os.SEEK_SET)
                ask_thread(process_id, read_page(page), STACKS_REQUEST)
        self._is_asked = True

    def cut(self, *, seconds: float) -> list[WorkerCut]:
        """Return a record of each worker that is still alive, `seconds` after the signal."""
        self._read()
        return [
            WorkerCut(rank=rank, time_ns=time.monotonic_ns(), after_seconds=seconds, doing=self._doing.get(rank, ""))
            for rank in sorted(self._process_ids)
        ]

    def _read(self) -> None:
        for rank in self._process_ids if self._is_asked else ():
            if rank not in self._pages:
                continue
            page = self._pages[rank]
            text = os.pread(page, _MAX_STACK_BYTES, PAGE_BYTES).decode(errors="replace")
            location = classify_stack(parse_main_stack(text, read_page(page).main_thread))
            if location.text:
                self._doing[rank] = location.text
