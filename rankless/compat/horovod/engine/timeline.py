"""A record of what became of each operation, in the format of Chrome's tracing: rank 0's view, as Horovod writes it.

Note [two lanes]: what was begun last in a lane is ended first. An operation has one for its negotiation and one for its
execution, since another rank may submit a name again before rank 0 has come to the end of it.
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


class Ready(Protocol):
    """An event on a device."""

    def query(self) -> bool:
        """Whether it has happened."""
        ...


class Timeline:
    """Writes while it is started; otherwise its methods do nothing. Rows are operations, by their keys."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._lock = threading.RLock()
        self._rows: dict[str, int] = {}
        self._open: Counter[tuple[str, int]] = Counter()
        """How much has begun and not ended, by key and lane."""
        self._start = 0.0
        self.marks_cycles = False

    def start(self, path: str, *, mark_cycles: bool = False) -> None:
        """Begin a new file; one that is being written is finished."""
        self.stop()
        with self._lock:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = Path(path).open("w")  # noqa: SIM115  # it is written to until `stop`
            self._file.write("[\n")
            self._rows, self._open, self._start = {}, Counter(), time.monotonic()
            self.marks_cycles = mark_cycles

    def stop(self) -> None:
        """Finish the file: what is under way ends there."""
        with self._lock:
            if self._file is not None:
                for (key, lane), count in self._open.items():
                    for _ in range(count):
                        self._write(key, "E", lane)
                self._file.write("{}]\n")
                self._file.close()
                self._file = None

    @property
    def is_on(self) -> bool:
        """Whether something is written."""
        return self._file is not None

    def negotiating(self, key: str, kind: str, rank: int) -> None:
        """A rank has submitted an operation; the first one begins its negotiation."""
        if self._file is None:
            return
        if not self._open[key, NEGOTIATION]:
            self._begin(key, f"NEGOTIATE_{kind.upper()}", NEGOTIATION)
        self._write(key, "X", NEGOTIATION, name=str(rank), dur=0)

    def negotiated(self, key: str, *, is_whole: bool) -> None:
        """All ranks have; unless it `is_whole`, others of its group are yet to come."""
        self._end(key, NEGOTIATION)
        if not is_whole:
            self._begin(key, "WAIT_FOR_OTHER_TENSOR_DATA", NEGOTIATION)

    def gathered(self, key: str) -> None:
        """All others of its group have come."""
        self._end(key, NEGOTIATION)

    def decided(self, key: str, kind: str, *, is_queued: bool) -> None:
        """It is to be executed, or (unless `is_queued`) its result is there already."""
        self._begin(key, kind.upper())
        if is_queued:
            self._begin(key, "QUEUE")
        else:
            self._end(key)

    def started(self, keys: Sequence[str]) -> None:
        """Their turn has come."""
        for key in keys:
            self._end(key)

    def finished(self, keys: Sequence[str]) -> None:
        """Their results are there."""
        for key in keys:
            self._end(key)

    def cycle(self) -> None:
        """Something is decided."""
        if self._file is not None and self.marks_cycles:
            self._write("", "i", EXECUTION, name="CYCLE_START", s="g")

    @contextmanager
    def activity(self, keys: Sequence[str], name: str) -> Iterator[None]:
        """Within, something is done to these operations."""
        for key in keys:
            self._begin(key, name)
        try:
            yield
        finally:
            for key in keys:
                self._end(key)

    def await_data(self, ready: Mapping[str, Ready]) -> None:
        """Wait until the tensors of all keys are there: how long for its own, and how long for the others'."""
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

    def _begin(self, key: str, name: str, lane: int = EXECUTION) -> None:
        if self._file is None:
            return
        with self._lock:  # one with what is counted: `stop` ends what it finds begun
            self._open[key, lane] += 1
            self._write(key, "B", lane, name=name)

    def _end(self, key: str, lane: int = EXECUTION) -> None:
        """What was begun last in the lane; nothing if that was before the start."""
        if self._file is None:
            return
        with self._lock:
            if self._open[key, lane]:
                self._open[key, lane] -= 1
                self._write(key, "E", lane)

    def _write(self, key: str, phase: str, lane: int, **more: object) -> None:
        event = {"ph": phase, "ts": int((time.monotonic() - self._start) * 1e6), "tid": lane, **more}
        with self._lock:
            if self._file is None:
                return
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = len(self._rows)
                names = {"name": "process_name", "ph": "M", "pid": row, "args": {"name": key}}
                self._file.write(json.dumps(names) + ",\n")
            self._file.write(json.dumps({**event, "pid": row}) + ",\n")
