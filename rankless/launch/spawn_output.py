"""Where the output of the processes of `rankless.spawn` goes: rank 0's to the caller, the others' to a hidden file."""

import codecs
import contextlib
import io
import os
import selectors
import sys
import tempfile
import threading
from typing import BinaryIO, Literal, TextIO

Show = Literal["first", "all"]
"""Whose output the caller shows."""
_TAIL_BYTES = 2000
_LEAVING_SECONDS = 2.0


class SpawnOutput:
    """The output of the processes of one call.

    A notebook, `contextlib.redirect_stdout` and the like replace `sys.stdout` by an object that is no file. The shown
    output is then copied into that object.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._hidden: dict[int, BinaryIO] = {}
        self._ends: list[int] = []
        self._copied: dict[int, TextIO] = {}
        self._thread: threading.Thread | None = None
        self._shown = tuple(self._descriptor(stream) for stream in (sys.stdout, sys.stderr))

    def descriptors(self, rank: int) -> tuple[int, int]:
        """Return the descriptors of a rank's standard output and standard error."""
        if rank == 0 or self._show == "all":
            return self._shown[0], self._shown[1]
        self._hidden[rank] = tempfile.TemporaryFile()  # noqa: SIM115  # close() closes it
        descriptor = self._hidden[rank].fileno()
        return descriptor, descriptor

    def start(self) -> None:
        """Begin to copy, when all processes have their descriptors."""
        for end in self._ends:
            os.close(end)
        self._ends = []
        if self._copied and self._thread is None:
            self._thread = threading.Thread(target=self._copy, name="rankless-spawn-output", daemon=True)
            self._thread.start()

    def tail(self, rank: int) -> str:
        """Return the end of a hidden rank's output."""
        file = self._hidden.get(rank)
        if file is None:
            return ""
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        return file.read().decode(errors="replace").strip()

    def close(self) -> None:
        """Wait for what is still to be copied, and delete the hidden output."""
        self.start()
        if self._thread is not None:
            self._thread.join(_LEAVING_SECONDS)  # a process that a worker left behind may still have the pipe
        for file in self._hidden.values():
            file.close()

    def _descriptor(self, stream: TextIO | None) -> int:
        if stream is None:
            end = os.open(os.devnull, os.O_WRONLY)
            self._ends.append(end)
            return end
        with contextlib.suppress(OSError, ValueError):
            if isinstance(stream, io.TextIOWrapper):
                stream.flush()
                return stream.fileno()
        reading, writing = os.pipe()
        self._ends.append(writing)
        self._copied[reading] = stream
        return writing

    def _copy(self) -> None:
        decoders = {end: codecs.getincrementaldecoder("utf-8")("replace") for end in self._copied}
        with selectors.DefaultSelector() as selector:
            for end in self._copied:
                selector.register(end, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, 1 << 16)
                    with contextlib.suppress(OSError, ValueError):  # the stream may be closed by now
                        self._copied[key.fd].write(decoders[key.fd].decode(data, final=not data))
                        self._copied[key.fd].flush()
                    if not data:
                        selector.unregister(key.fd)
                        os.close(key.fd)
