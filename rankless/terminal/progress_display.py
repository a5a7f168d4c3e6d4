"""The progress line below a job's output."""

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING

from rankless.records.events import AnyRecord, Progress

if TYPE_CHECKING:
    from rankless.terminal.progress import ProgressDisplay


class ProgressLine:
    """An observer that draws progress records, if there ever are any: rich is not imported for other jobs."""

    def __init__(self) -> None:
        self._display: ProgressDisplay | None = None

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.close()

    def take(self, record: AnyRecord) -> None:
        """Show a progress record; others are not for this observer."""
        if isinstance(record, Progress):
            if self._display is None:
                self._display = importlib.import_module("rankless.terminal.progress").ProgressDisplay()
            self._display.show(record)

    def making_room(self) -> AbstractContextManager[None]:
        """A context in which the terminal is free for other text."""
        return nullcontext() if self._display is None else self._display.hidden()
