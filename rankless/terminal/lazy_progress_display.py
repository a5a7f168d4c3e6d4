"""Show the progress line below a job's output."""

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from rankless.records.events import AnyRecord, Progress
from rankless.terminal.cursor_tracker import CursorTracker

if TYPE_CHECKING:
    from rankless.terminal.progress_display import ProgressDisplay


class ProgressObserver:
    """Observes a job's records and shows its progress; imports rich only once a job reports progress.

    `cursor` follows the output of the script on the same terminal.
    """

    def __init__(self) -> None:
        self.cursor = CursorTracker()
        self._display: ProgressDisplay | None = None

    def __enter__(self) -> "ProgressObserver":
        return self

    def __exit__(self, *_error: object) -> None:
        if self._display is not None:
            self._display.close()

    def receive(self, record: AnyRecord) -> None:
        """Show a progress record; ignore all others."""
        if isinstance(record, Progress):
            if self._display is None:
                module = importlib.import_module("rankless.terminal.progress_display")
                self._display = module.ProgressDisplay(cursor=self.cursor)
            self._display.show(record)

    def hidden(self) -> AbstractContextManager[None]:
        """Return a context in which the terminal is free for other text."""
        return nullcontext() if self._display is None else self._display.hidden()
