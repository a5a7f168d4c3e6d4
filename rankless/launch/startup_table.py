"""The table of workers on the terminal: shown once their process ids are known, before the output of any worker."""

import time
from collections.abc import Callable, Mapping

from rankless.records.events import AnyRecord, Started

LONGEST_WAIT_SECONDS = 3.0
"""Between the first worker's start and the table: other hosts may still import torch."""


class WorkerTable:
    """Waits for the workers' process ids, and writes the table once.

    Args:
        format_table: Returns the table for process ids by rank; a rank may be missing.
        write: Writes it on the terminal.
        world_size: The number of workers of the job.
    """

    def __init__(
        self, format_table: Callable[[Mapping[int, int]], str], write: Callable[[str], None], *, world_size: int
    ) -> None:
        self._format_table = format_table
        self._write = write
        self._world_size = world_size
        self._process_ids: dict[int, int] = {}
        self._first_at: float | None = None
        self.is_shown = not format_table({})

    def receive(self, record: AnyRecord) -> None:
        """Note the process id of a worker that has started, and write the table after the last one's."""
        if isinstance(record, Started):
            self._process_ids[record.rank] = record.pid
            self._first_at = self._first_at or time.monotonic()
            if len(self._process_ids) == self._world_size:
                self.show()

    def is_due(self, now: float) -> bool:
        """Whether the table has waited for long enough since the first worker's start."""
        return self._first_at is not None and now - self._first_at > LONGEST_WAIT_SECONDS

    def show(self) -> None:
        """Write the table, unless that has happened or no worker has started."""
        if not self.is_shown and self._process_ids:
            self.is_shown = True
            self._write(self._format_table(self._process_ids))
