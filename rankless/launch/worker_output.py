"""The workers' output on the terminal, read along from the files that they write."""

import contextlib
import io
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TextIO

_BLOCK = 1 << 16
_LINE_ENDS = re.compile(rb"\r\n|\n|\r(?!\n|$)")
"""A progress bar ends its lines with carriage returns alone; one at the very end may be half of a line's end."""

Source = Literal["out", "err"]
SOURCES: tuple[Source, ...] = ("out", "err")
"""A worker's standard output and standard error."""
Write = Callable[[bytes], None]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A file to be read along, and how it is shown."""

    path: str
    sink: Source = "out"
    prefix: str | None = None
    """What stands before each line; "" shows whole lines as they are, None everything as it comes."""
    timed: bool = False
    """Whether the time stands before the prefix."""
    needles: tuple[str, ...] = ()
    copy: str | None = None
    """A file that gets the lines which contain one of the needles."""


class Lines(Protocol):
    """What takes the bytes of one file."""

    def write(self, data: bytes) -> None:
        """Take what is new."""

    def idle(self) -> None:
        """Nothing new has come for a turn."""

    def close(self) -> None:
        """Nothing will come."""


class Tail:
    """Reads along in one growing file."""

    def __init__(self, path: str, lines: Lines) -> None:
        self._path = path
        self._lines = lines
        self._file: io.FileIO | None = None

    def pump(self) -> None:
        """Pass on what is new."""
        if self._file is None:
            try:
                self._file = io.FileIO(self._path)
            except OSError:
                return
        found = False
        while data := self._file.read(_BLOCK):
            self._lines.write(data)
            found = True
        if not found:
            self._lines.idle()

    def finish(self) -> None:
        """Pass on the rest, since its writer has ended."""
        self.pump()
        self._lines.close()

    def close(self) -> None:
        """Pass on the rest, and read no more."""
        self.finish()
        if self._file is not None:
            self._file.close()


class AsTheyCome:
    """Writes everything at once, for one rank whose output is shown alone."""

    def __init__(self, write: Write) -> None:
        self.write = write

    def idle(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


class WholeLines:
    """Writes lines as they are, and the beginning of one when nothing has followed it for a turn."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Write the lines that `data` completes."""
        data = self._rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._rest = data[end:]
        if end:
            self._write(data[:end])

    def idle(self) -> None:
        """Write the beginning of a line."""
        if self._rest:
            self._write(self._rest)
            self._rest = b""

    close = idle


class PrefixedLines:
    """Writes whole lines, each with its prefix; `close` writes a last line that has no end.

    With needles, only the lines that contain one of them.
    """

    def __init__(self, prefix: str, write: Write, *, needles: Sequence[str] = (), timed: bool = False) -> None:
        self._prefix = prefix.encode()
        self._timed = timed
        self._write = write
        self._needles = [needle.encode() for needle in needles]
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Write the lines that `data` completes."""
        *lines, self._rest = _LINE_ENDS.split(self._rest + data)
        self._put(lines)

    def idle(self) -> None:
        """The beginning of a line is kept: another rank's might come between."""

    def close(self) -> None:
        """Write what is left."""
        if self._rest:
            self._put([self._rest.removesuffix(b"\r")])
            self._rest = b""

    def _put(self, lines: Sequence[bytes]) -> None:
        wanted = [line for line in lines if not self._needles or any(needle in line for needle in self._needles)]
        if wanted:
            prefix = (time.asctime().encode() if self._timed else b"") + self._prefix
            self._write(b"".join(prefix + line + b"\n" for line in wanted))


class Terminal:
    """All streams that are shown."""

    def __init__(self, streams: Sequence[Stream], *, writes: Mapping[Source, Write]) -> None:
        self._writes = writes
        self._tails: list[Tail] = []
        self._copies = contextlib.ExitStack()
        for stream in streams:
            self.add(stream)

    def add(self, stream: Stream) -> None:
        """Show one more stream from now on."""
        self._tails.append(Tail(stream.path, _lines_of(stream, self._writes[stream.sink])))
        if stream.copy is not None:
            copy = self._copies.enter_context(io.FileIO(stream.copy, "ab"))
            lines = PrefixedLines(stream.prefix or "", _writer(copy), needles=stream.needles)
            self._tails.append(Tail(stream.path, lines))

    def pump(self) -> None:
        """Show what is new."""
        for tail in self._tails:
            tail.pump()

    def show(self, source: Source, data: bytes) -> None:
        """Show what another host has sent."""
        self._writes[source](data)

    def finish(self) -> None:
        """Show what is left of lines that nobody will end."""
        for tail in self._tails:
            tail.finish()

    def close(self) -> None:
        """Show the rest."""
        with self._copies:
            for tail in self._tails:
                tail.close()


def writer_to(text: TextIO, making_room: Callable[[], AbstractContextManager[None]]) -> Write:
    """What writes on the agent's own terminal; `making_room` is entered around each writing."""

    def write(data: bytes) -> None:
        # A reader that is gone (`| head`) or a full disk behind the terminal's redirection never stops training.
        with making_room(), contextlib.suppress(OSError):
            text.flush()
            binary = getattr(text, "buffer", None)
            if binary is None:
                text.write(data.decode(errors="replace"))
            else:
                binary.write(data)
                binary.flush()

    return write


def _writer(file: io.FileIO) -> Write:
    def write(data: bytes) -> None:
        with contextlib.suppress(OSError):  # as for the terminal
            file.write(data)

    return write


def _lines_of(stream: Stream, write: Write) -> Lines:
    if stream.prefix is None:
        return AsTheyCome(write)
    return PrefixedLines(stream.prefix, write, timed=stream.timed) if stream.prefix else WholeLines(write)
