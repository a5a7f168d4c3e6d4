"""A record of what became of each operation, in the format of Chrome's tracing: rank 0's view, as Horovod writes it."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class Timeline:
    """Writes while it is started; otherwise its methods do nothing. Rows are operations, by their keys."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._open: set[str] = set()
        self._start = 0.0
        self.marks_cycles = False

    def start(self, path: str, *, mark_cycles: bool = False) -> None:
        """Begin a new file; one that is being written is finished."""
        self.stop()
        with self._lock:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = Path(path).open("w")  # noqa: SIM115  # it is written to until `stop`
            self._file.write("[\n")
            self._rows, self._open, self._start = {}, set(), time.monotonic()
            self.marks_cycles = mark_cycles

    def stop(self) -> None:
        """Finish the file."""
        with self._lock:
            if self._file is not None:
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
        if key not in self._open:
            self._open.add(key)
            self._write(key, "B", name=f"NEGOTIATE_{kind.upper()}")
        self._write(key, "X", name=str(rank), dur=0)

    def negotiated(self, key: str) -> None:
        """All ranks have."""
        if self._file is not None and key in self._open:
            self._open.discard(key)
            self._write(key, "E")

    def decided(self, key: str, kind: str, *, is_queued: bool) -> None:
        """It is to be executed, or (unless `is_queued`) its result is there already."""
        if self._file is not None:
            self._write(key, "B", name=kind.upper())
            if is_queued:
                self._write(key, "B", name="QUEUE")
            else:
                self._write(key, "E")

    def started(self, keys: Sequence[str]) -> None:
        """Their turn has come."""
        self._end(keys)

    def finished(self, keys: Sequence[str]) -> None:
        """Their results are there."""
        self._end(keys)

    def _end(self, keys: Sequence[str]) -> None:
        if self._file is not None:
            for key in keys:
                self._write(key, "E")

    def cycle(self) -> None:
        """Something is decided."""
        if self._file is not None and self.marks_cycles:
            self._write("", "i", name="CYCLE_START", s="g")

    @contextmanager
    def activity(self, keys: Sequence[str], name: str) -> Iterator[None]:
        """Within, something is done to these operations."""
        if self._file is None:
            yield
            return
        for key in keys:
            self._write(key, "B", name=name)
        try:
            yield
        finally:
            for key in keys:
                self._write(key, "E")

    def _write(self, key: str, phase: str, **more: object) -> None:
        event = {"ph": phase, "ts": int((time.monotonic() - self._start) * 1e6), **more}
        with self._lock:
            if self._file is None:
                return
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = len(self._rows)
                names = {"name": "process_name", "ph": "M", "pid": row, "args": {"name": key}}
                self._file.write(json.dumps(names) + ",\n")
            self._file.write(json.dumps({**event, "pid": row}) + ",\n")
