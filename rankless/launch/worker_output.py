"""The terminal: the workers' output, read from their log files while they write them, and the agent's own lines."""

import contextlib
import io
import itertools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TextIO

from rankless.config.run_config import AgreedJobConfig, RunConfig
from rankless.terminal.cursor_tracker import CursorTracker

_BLOCK = 1 << 16
_UNFINISHED_SECONDS = 0.5
"""How long an unfinished line stays as it is before the terminal shows it.

A script may write a line in several pieces, and on a busy machine a long time may pass between two of them. A line of
another rank would stand within it then.
"""
_LINE_ENDS = re.compile(rb"\r\n|\n|\r")
"""Progress bars end lines with a lone carriage return."""

Source = Literal["out", "err"]
SOURCES: tuple[Source, ...] = ("out", "err")
"""A worker's standard output and standard error."""
Write = Callable[[bytes], None]


@dataclass(frozen=True, kw_only=True)
class FollowedFile:
    """A file to follow, and how the terminal shows it."""

    path: str
    sink: Source = "out"
    prefix: str | None = None
    """The text before each line; "" shows whole lines unchanged, None shows all data at once."""
    has_timestamps: bool = False
    """Whether the time precedes the prefix."""
    filters: tuple[str, ...] = ()
    copy: str | None = None
    """A file that gets the lines which contain one of the filters."""


class LineWriter(Protocol):
    """Writes the bytes of one file in some form."""

    def write(self, data: bytes) -> None:
        """Take new data."""

    def idle(self) -> None:
        """Take note that no new data arrived since the last call."""

    def close(self) -> None:
        """Write what is left."""


class FileTail:
    """Follows one growing file. It can leave out the text of the exception that ends the file's writer."""

    def __init__(self, path: str, lines: LineWriter, *, position: int = 0) -> None:
        self.path = path
        self._lines = lines
        self._file: io.FileIO | None = None
        self._position = position
        self._measured: int | None = None
        self._withheld_from: int | None = None

    def measure(self) -> None:
        """Have the next `pump` write only what the file has now."""
        self._measured = self._size()

    def withhold(self, start: int) -> None:
        """Write nothing from byte `start` of the file on, until `resume`. What has been written stays written."""
        self._withheld_from = max(start, self._position)

    def resume(self, *, skip_to: int | None = None) -> bool:
        """Write on, and leave out what stands before byte `skip_to`. Returns whether something was withheld."""
        start, self._withheld_from = self._withheld_from, None
        if start is None or self._size() <= start:
            return False
        self._position = max(start, 0 if skip_to is None else skip_to)
        return True

    def pump(self) -> None:
        """Write new data."""
        found = False
        while data := self._read():
            self._lines.write(data)
            found = True
        self._measured = None
        if not found:
            self._lines.idle()

    def finish(self) -> None:
        """Write the rest, because the file's writer has ended."""
        self.pump()
        self._lines.close()

    def _read(self) -> bytes:
        size = self._size() if self._measured is None else self._measured
        if self._withheld_from is not None:
            size = min(size, self._withheld_from)
        if self._file is None or self._position >= size:
            return b""
        data = os.pread(self._file.fileno(), min(_BLOCK, size - self._position), self._position)
        self._position += len(data)
        return data

    def _size(self) -> int:
        if self._file is None:
            try:
                self._file = io.FileIO(self.path)
            except OSError:
                return 0
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Write the rest and close the file."""
        self.finish()
        if self._file is not None:
            self._file.close()


class PassThrough:
    """Writes all data at once, for a single rank."""

    def __init__(self, write: Write) -> None:
        self.write = write

    def idle(self) -> None:
        """Do nothing: no data is held back."""

    def close(self) -> None:
        """Do nothing: no data is held back."""


class _UnfinishedLine:
    """The start of a line whose end has not arrived yet.

    A line may be of any length, and it arrives in blocks. Each block is searched for line ends once and joined once, so
    that the cost of a line is proportional to its length.
    """

    def __init__(self) -> None:
        self._blocks: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, data: bytes) -> None:
        """Append data that ends no line."""
        if data:
            self._blocks.append(data)

    def take(self, end: bytes = b"") -> bytes:
        """Return the line up to `end`, and begin the next one."""
        blocks, self._blocks = self._blocks, []
        return b"".join((*blocks, end)) if blocks else end


class WholeLines:
    """Writes whole lines unchanged, and an unfinished line if no data follows it for half a second."""

    def __init__(self, write: Write, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._unfinished = _UnfinishedLine()
        self._written_at = 0.0

    def write(self, data: bytes) -> None:
        """Write the lines that `data` completes."""
        self._written_at = self._clock()
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end:
            self._write(self._unfinished.take(data[:end]))
        self._unfinished.add(data[end:])

    def idle(self) -> None:
        """Write an unfinished line that has waited long enough."""
        if self._unfinished and self._clock() - self._written_at >= _UNFINISHED_SECONDS:
            self.close()

    def close(self) -> None:
        """Write an unfinished line."""
        if self._unfinished:
            self._write(self._unfinished.take())


class PrefixedLines:
    """Writes whole lines, each with a prefix; `close` writes a last line without an end.

    With `filters` it writes only lines that contain one of them.
    """

    def __init__(self, prefix: str, write: Write, *, filters: Sequence[str] = (), has_timestamps: bool = False) -> None:
        self._prefix = prefix.encode()
        self._has_timestamps = has_timestamps
        self._write = write
        self._filters = [text.encode() for text in filters]
        self._unfinished = _UnfinishedLine()
        self._half_end = b""
        """A carriage return at the end of all data, which may be the first half of a line end."""

    def write(self, data: bytes) -> None:
        """Write the lines that `data` completes."""
        data = self._half_end + data
        self._half_end = data[-1:] if data.endswith(b"\r") else b""
        first, *others = _LINE_ENDS.split(data.removesuffix(self._half_end))
        if not others:
            self._unfinished.add(first)
            return
        *lines, rest = others
        self._write_lines([self._unfinished.take(first), *lines])
        self._unfinished.add(rest)

    def idle(self) -> None:
        """Do nothing: another rank's line could interrupt an unfinished one."""

    def close(self) -> None:
        """Write an unfinished last line."""
        if self._unfinished or self._half_end:
            self._half_end = b""
            self._write_lines([self._unfinished.take()])

    def _write_lines(self, lines: Sequence[bytes]) -> None:
        wanted = [line for line in lines if not self._filters or any(text in line for text in self._filters)]
        if wanted:
            prefix = (time.asctime().encode() if self._has_timestamps else b"") + self._prefix
            self._write(b"".join(prefix + line + b"\n" for line in wanted))


class WorkerOutputFollower:
    """All streams that the terminal shows."""

    def __init__(self, streams: Sequence[FollowedFile], *, writers: Mapping[Source, Write]) -> None:
        self._writers = writers
        self._tails: list[FileTail] = []
        self._copies = contextlib.ExitStack()
        for stream in streams:
            self.add(stream)

    def add(self, stream: FollowedFile, *, position: int = 0) -> None:
        """Show one more stream from now on, from a byte of its file on."""
        lines = _make_line_writer(stream, self._writers[stream.sink])
        self._tails.append(FileTail(stream.path, lines, position=position))
        if stream.copy is not None:
            copy = self._copies.enter_context(io.FileIO(stream.copy, "ab"))
            lines = PrefixedLines(stream.prefix or "", _file_writer(copy), filters=stream.filters)
            self._tails.append(FileTail(stream.path, lines))

    def remove(self, path: str) -> None:
        """Show nothing of a file from now on."""
        for tail in self._tails_of(path):
            tail.close()
            self._tails.remove(tail)

    def measure(self) -> None:
        """Have the next `pump` show only what has been written by now."""
        for tail in self._tails:
            tail.measure()

    def pump(self) -> None:
        """Show new data."""
        for tail in self._tails:
            tail.pump()

    def withhold(self, path: str, start: int) -> None:
        """Show nothing of a file from byte `start` on: the text of the exception that ends its worker."""
        for tail in self._tails_of(path):
            tail.withhold(start)

    def resume(self, path: str, *, skip_to: int | None = None) -> bool:
        """Show the rest of a file, from byte `skip_to` on. Returns whether something was withheld."""
        withheld = [tail.resume(skip_to=skip_to) for tail in self._tails_of(path)]
        return any(withheld)

    def _tails_of(self, path: str) -> list[FileTail]:
        return [tail for tail in self._tails if tail.path == path]

    def show(self, source: Source, data: bytes) -> None:
        """Show data that another host has sent."""
        self._writers[source](data)

    def finish(self) -> None:
        """Show unfinished lines, because all workers have ended."""
        for tail in self._tails:
            tail.finish()

    def close(self) -> None:
        """Show the rest and close all files."""
        with self._copies:
            for tail in self._tails:
                tail.close()


def make_writer(text: TextIO, hide_progress: Callable[[], AbstractContextManager[None]]) -> Write:
    """Return a function that writes to the agent's terminal and enters `hide_progress` while it does."""

    def write(data: bytes) -> None:
        # A closed pipe (`| head`) or a full disk behind a redirection never stops training.
        with hide_progress(), contextlib.suppress(OSError):
            text.flush()
            binary = getattr(text, "buffer", None)
            if binary is None:
                text.write(data.decode(errors="replace"))
            else:
                binary.write(data)
                binary.flush()

    return write


def count_common_bytes(path: str, other: str) -> int:
    """Return with how many equal bytes two files begin."""
    count = 0
    with contextlib.suppress(OSError), io.FileIO(path) as first, io.FileIO(other) as second:
        while (block := first.read(_BLOCK)) and (found := second.read(_BLOCK)):
            equal = (one == two for one, two in zip(block, found, strict=False))
            common = sum(itertools.takewhile(bool, equal))
            count += common
            if common < _BLOCK:
                break
    return count


def _file_writer(file: io.FileIO) -> Write:
    def write(data: bytes) -> None:
        with contextlib.suppress(OSError):  # as for the terminal
            file.write(data)

    return write


def _make_line_writer(stream: FollowedFile, write: Write) -> LineWriter:
    if stream.prefix is None:
        return PassThrough(write)
    return (
        PrefixedLines(stream.prefix, write, has_timestamps=stream.has_timestamps)
        if stream.prefix
        else WholeLines(write)
    )


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
    """Return descriptors for one worker: of the whole terminal with `--debug-rank`, of the input for a single worker,
    and for rank 0 of a logical view, which reads for all.

    Empty for other runs, and where this process has no such descriptor.
    """
    numbers = (0, 1, 2) if config.debug_rank is not None else (0,)
    reads_alone = start.is_logical or (start.world_size == 1 and config.request.agent_output != "table")
    is_for_one = config.debug_rank is not None or reads_alone
    try:
        return [os.dup(number) for number in numbers] if is_for_one else []
    except OSError:  # a daemon may have closed them
        return []


def _escape(text: str, stream: TextIO) -> str:
    """Return a text with escapes for what a stream cannot show, and for control characters."""
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a stream in memory has none
    shown = text.encode(encoding, errors="backslashreplace").decode(encoding)
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", shown)
