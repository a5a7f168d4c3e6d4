"""Records what happens to each operation, in the format of Chrome's tracing. As in Horovod, only rank 0 writes it.

Note [two threads per operation]: in this format, what begins last in a thread ends first. Each operation has one thread
id for its negotiation and one for its execution, since another rank may submit a name again before rank 0 has finished
executing it.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

NEGOTIATION, EXECUTION = 0, 1
POLL_SECONDS = 1e-5


class DeviceEvent(Protocol):
    """An event on a device."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...


class Timeline:
    """Writes events between `start` and `stop`, and ignores them otherwise. Each operation is a process, by its key."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._lock = threading.RLock()
        self._rows: dict[str, int] = {}
        self._open: Counter[tuple[str, int]] = Counter()
        """How many events have begun and not ended, by key and thread id."""
        self._start = 0.0
        self.marks_cycles = False

    def start(self, path: str, *, mark_cycles: bool = False) -> None:
        """Begin a new file, after completing the current one."""
        self.stop()
        with self._lock:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # Each event is written at once: the file shows what happens, and a killed process loses nothing.
            self._file = Path(path).open("w", buffering=1)  # noqa: SIM115  # `stop` closes it
            self._file.write("[\n")
            self._rows, self._open, self._start = {}, Counter(), time.monotonic()
            self.marks_cycles = mark_cycles

    def stop(self) -> None:
        """Complete the file: end all open events."""
        with self._lock:
            if self._file is not None:
                for (key, thread_id), count in self._open.items():
                    for _ in range(count):
                        self._write(key, "E", thread_id)
                self._file.write("{}]\n")
                self._file.close()
                self._file = None

    @property
    def is_on(self) -> bool:
        """Whether events are written."""
        return self._file is not None

    def record_submission(self, key: str, kind: str, rank: int) -> None:
        """Record that a rank has submitted an operation. The first rank begins the negotiation."""
        if self._file is None:
            return
        if not self._open[key, NEGOTIATION]:
            self._begin(key, f"NEGOTIATE_{kind.upper()}", NEGOTIATION)
        self._write(key, "X", NEGOTIATION, name=str(rank), dur=0)

    def end_negotiation(self, key: str, *, is_whole: bool) -> None:
        """Record that all ranks have submitted an operation. Unless `is_whole`, it waits for others of its group."""
        self._end(key, NEGOTIATION)
        if not is_whole:
            self._begin(key, "WAIT_FOR_OTHER_TENSOR_DATA", NEGOTIATION)

    def end_group_wait(self, key: str) -> None:
        """Record that all ranks have submitted the others of its group."""
        self._end(key, NEGOTIATION)

    def begin_execution(self, key: str, kind: str, *, is_queued: bool) -> None:
        """Record that an operation is scheduled. Unless `is_queued`, its result has arrived already."""
        self._begin(key, kind.upper())
        if is_queued:
            self._begin(key, "QUEUE")
        else:
            self._end(key)

    def end_queue(self, keys: Sequence[str]) -> None:
        """Record that the operations leave the queue."""
        for key in keys:
            self._end(key)

    def end_execution(self, keys: Sequence[str]) -> None:
        """Record that the operations have their results."""
        for key in keys:
            self._end(key)

    def mark_cycle(self) -> None:
        """Mark the start of a cycle, if marks are switched on."""
        if self._file is not None and self.marks_cycles:
            self._write("", "i", EXECUTION, name="CYCLE_START", s="g")

    @contextmanager
    def activity(self, keys: Sequence[str], name: str) -> Iterator[None]:
        """Record an activity of these operations, for the duration of the block."""
        for key in keys:
            self._begin(key, name)
        try:
            yield
        finally:
            for key in keys:
                self._end(key)

    def wait_for_data(self, ready: Mapping[str, DeviceEvent]) -> None:
        """Wait for the tensors of all keys. Record how long each waits for its own tensor, and then for the others."""
        waiting = dict(ready)
        for key in waiting:
            self._begin(key, "WAIT_FOR_DATA")
        while waiting:
            for key in [key for key, one in waiting.items() if one.query()]:
                del waiting[key]
                self._end(key)
                self._begin(key, "WAIT_FOR_OTHER_TENSOR_DATA")
            time.sleep(POLL_SECONDS if waiting else 0)
        for key in ready:
            self._end(key)

    def _begin(self, key: str, name: str, thread_id: int = EXECUTION) -> None:
        if self._file is None:
            return
        with self._lock:  # together with the count: `stop` ends every open event
            self._open[key, thread_id] += 1
            self._write(key, "B", thread_id, name=name)

    def _end(self, key: str, thread_id: int = EXECUTION) -> None:
        """End the event begun last in the thread. Does nothing if it began before `start`."""
        if self._file is None:
            return
        with self._lock:
            if self._open[key, thread_id]:
                self._open[key, thread_id] -= 1
                self._write(key, "E", thread_id)

    def _write(self, key: str, phase: str, thread_id: int, **more: object) -> None:
        event = {"ph": phase, "ts": int((time.monotonic() - self._start) * 1e6), "tid": thread_id, **more}
        with self._lock:
            if self._file is None:
                return
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = len(self._rows)
                names = {"name": "process_name", "ph": "M", "pid": row, "args": {"name": key}}
                self._file.write(json.dumps(names) + ",\n")
            self._file.write(json.dumps({**event, "pid": row}) + ",\n")
