"""The two streams of the agent's terminal, which it shares with the script's output and a progress display."""

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TextIO

from rankless.config.run_config import AgreedJobConfig, RunConfig
from rankless.launch.worker_output import Source, Write, make_writer
from rankless.terminal.cursor_tracker import CursorTracker

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that act on a terminal. The message of an error may have any, such as those that clear the screen."""


@dataclass(frozen=True, kw_only=True)
class TerminalStreams:
    """Where the agent writes, between what workers write."""

    out: TextIO
    err: TextIO
    hide_progress: Callable[[], AbstractContextManager[None]]
    cursor: CursorTracker | None
    """None if the two streams end in different places: the script's output then cannot meet the agent's lines."""

    def writers(self) -> dict[Source, Write]:
        """Return what writes the output of workers."""
        return {"out": self._writer(self.out), "err": self._writer(self.err)}

    def _writer(self, text: TextIO) -> Write:
        write, cursor = make_writer(text, self.hide_progress), self.cursor
        if cursor is None:
            return write

        def write_and_follow(data: bytes) -> None:
            write(data)
            cursor.feed(data)

        return write_and_follow

    def notify(self, text: str) -> None:
        """Write a notice."""
        with self.hide_progress():
            self.write_error(f"rankless: {text}\n")

    def write_error(self, text: str) -> None:
        """Write text of the agent, on a line of its own. It may quote names and messages of the script."""
        text = _escape(text, self.err)
        if self.cursor is not None and text:
            if self.cursor.is_inside_line:  # below a bar there may be more bars: erase them
                text = ("\n\x1b[J" if self.err.isatty() else "\n") + text
            self.cursor.feed(text.encode())
        try:
            self.err.write(text)
            self.err.flush()
        except OSError:  # the terminal is gone, and training continues
            return

    def write_table(self, text: str) -> None:
        """Write a table, which may be long."""
        with self.hide_progress():
            self.write_error(text)


def duplicate_terminal(config: RunConfig, start: AgreedJobConfig) -> list[int]:
    """Return descriptors for one worker: of the whole terminal with `--debug-rank`, of the input for a single worker.

    Empty for other runs, and where this process has no such descriptor.
    """
    numbers = (0, 1, 2) if config.debug_rank is not None else (0,)
    is_for_one = config.debug_rank is not None or (start.world_size == 1 and config.agent_output != "table")
    try:
        return [os.dup(number) for number in numbers] if is_for_one else []
    except OSError:  # a daemon may have closed them
        return []


def _escape(text: str, stream: TextIO) -> str:
    """Return a text with escapes for what a stream cannot show, and for control characters."""
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a stream in memory has none
    shown = text.encode(encoding, errors="backslashreplace").decode(encoding)
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", shown)
