"""The progress line: redrawn in place on a terminal, printed as plain lines at intervals if the output is piped."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rankless.records.events import Progress
from rankless.records.number_formatting import format_sample_rate
from rankless.terminal.cursor_tracker import CursorTracker

PLAIN_INTERVAL_SECONDS = 5.0
BAR_WIDTH = 24


class ProgressDisplay:
    """Shows the progress of one job on `file`, by default standard error.

    On a terminal, the line stays at the bottom. Text written inside `hidden()`, and prints of this process, appear
    above it. Elsewhere the display writes a plain line at most every 5 s and at the end of each epoch.

    With a `cursor`, it writes nothing while a script's line is unfinished or a script draws bars of its own. The line
    of an epoch's end then appears as soon as the terminal is free.
    """

    def __init__(
        self,
        file: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        cursor: CursorTracker | None = None,
    ) -> None:
        self._file = sys.stderr if file is None else file
        self._clock = clock
        self._cursor = cursor
        self._delayed: Progress | None = None
        self._last_written_at: float | None = None
        self._live: Live | None = None
        console = Console(file=self._file)
        # FORCE_COLOR makes rich take any file for a terminal, and a notebook sets it for its child processes.
        is_terminal = self._file.isatty() and console.is_terminal and not console.is_dumb_terminal
        self._console = console if is_terminal else None

    def show(self, progress: Progress) -> None:
        """Update the line; the line of an epoch's last step stays on the terminal."""
        if self._cursor is not None and not self._cursor.is_free:
            self._delayed = progress if progress.last_of_epoch else self._delayed
            return
        delayed, self._delayed = self._delayed, None
        for each in filter(None, (delayed, progress)):
            self._write(each)

    def _write(self, progress: Progress) -> None:
        if self._console is None:
            self._write_plain(progress)
            return
        if self._live is None:
            self._live = self._start_live(self._console)
        if progress.last_of_epoch:
            self._stop_live()
            self._console.print(_make_row(progress), soft_wrap=True)
        else:
            self._live.update(_make_row(progress), refresh=True)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Return a context in which the terminal is free for whole lines of text; the next `show` redraws the line."""
        self._stop_live()
        yield

    def close(self) -> None:
        """Remove the line from the terminal."""
        self._stop_live()

    def _start_live(self, console: Console) -> Live:
        # No refresh thread, because it would be alive when a script forks. Redirect standard output only if it is a
        # terminal: piped output must stay byte for byte what the script wrote.
        live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        live.start()
        # Live hides the cursor until it stops, and a killed process never stops it.
        console.show_cursor(True)
        return live

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _write_plain(self, progress: Progress) -> None:
        now = self._clock()
        due = self._last_written_at is None or now - self._last_written_at >= PLAIN_INTERVAL_SECONDS
        if due or progress.last_of_epoch:
            self._last_written_at = now
            self._file.write(format_progress(progress) + "\n")
            self._file.flush()


def format_progress(progress: Progress) -> str:
    """Format the progress as one line of text: `epoch 1  step 15/15  loss 0.5230  8,140 samples/s  0:00 left`."""
    return "  ".join(_format_fields(progress))


def _format_fields(progress: Progress) -> list[str]:
    steps = "" if progress.steps_per_epoch is None else f"/{progress.steps_per_epoch}"
    fields = [f"epoch {progress.epoch}", f"step {progress.step}{steps}"]
    if progress.loss is not None:
        fields.append(f"loss {_format_loss(progress.loss)}")
    if progress.samples_per_second > 0:
        fields.append(format_sample_rate(progress.samples_per_second))
    if progress.seconds_left is not None:
        fields.append(f"{_format_duration(progress.seconds_left)} left")
    return fields


def _format_loss(loss: float) -> str:
    return f"{loss:.4f}" if not 0 < abs(loss) < 1e-3 else f"{loss:.3e}"


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _make_row(progress: Progress) -> Table:
    """Put the same fields into one table row, with a bar if the length of the epoch is known."""
    row: list[Text | ProgressBar] = [Text(field) for field in _format_fields(progress)]
    if progress.steps_per_epoch is not None:
        row.insert(1, ProgressBar(total=progress.steps_per_epoch, completed=progress.step, width=BAR_WIDTH))
    table = Table.grid(padding=(0, 2))
    for cell in row:
        table.add_column(no_wrap=isinstance(cell, Text), overflow="ellipsis")
    table.add_row(*row)
    return table
