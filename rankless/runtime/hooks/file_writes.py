"""Noticing which files a worker's script writes, so that the agent can see where several ranks write one.

Python tells an audit hook of every file it opens. `torch.save` opens its file in C++, unseen, so it is watched itself.
Not seen: what other C libraries write (safetensors, HDF5, SQLite), and what the script's own child processes write.
"""

import contextlib
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from rankless.config.worker_config import WorkerConfig
from rankless.records.events import FileOpened
from rankless.user_code import is_library

_EVENTS = frozenset({"open", "os.rename"})
_WRITING = os.O_WRONLY | os.O_RDWR
_OWN = os.O_EXCL | os.O_DIRECTORY
"""What nobody else may have made, or is never given a name, as temporary files are."""
_MOST_FILES = 1000
_DEVICES = ("/dev/", "/proc/", "/sys/")


class FileWriteMonitor:
    """Sends a record for each file that this worker's script opens for writing, appending or replacing: once each."""

    def __init__(self, config: WorkerConfig, *, send: Callable[[FileOpened], None]) -> None:
        self._rank = config.rank
        self._process_id = config.process_id
        self._send = send
        self._known: set[str] = set()
        home, temporary = os.path.expanduser("~"), tempfile.gettempdir()
        # Caches of libraries, made for several processes at once; logs, which are the run's own.
        self._ignored = (
            *_DEVICES,
            os.path.join(home, "."),
            os.path.join(temporary, "torchinductor"),
            os.path.dirname(os.path.abspath(config.log_file)) + os.sep,
        )

    def begin(self) -> None:
        """Watch from now on, to the process's end."""

        # Local names: the hook is called to the very end, when the module's own may be gone.
        events, writing, own, written = _EVENTS, _WRITING, _OWN, self.written

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in events:  # nearly always
                return
            if event == "os.rename":
                written(arguments[1])
            elif arguments[2] & writing and not arguments[2] & own:
                written(arguments[0])

        sys.addaudithook(hook)

    def watch_saving(self, serialization: Any) -> None:
        """Watch `torch.save`, given `torch.serialization`."""
        save = serialization.save

        @functools.wraps(save)
        def watched(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            self.written(f)
            save(obj, f, *args, **kwargs)

        serialization.save = sys.modules["torch"].save = watched  # type: ignore[attr-defined]  # torch's own name

    def written(self, path: Any) -> None:
        """Note that a file is written, if it is a file by name, and none of ours."""
        if not isinstance(path, str | bytes | os.PathLike) or len(self._known) >= _MOST_FILES:
            return
        with contextlib.suppress(Exception):  # whatever is odd about a path, opening it is the script's business
            name = os.path.abspath(os.fsdecode(path))
            if name in self._known or os.getpid() != self._process_id or self._is_ignored(name):
                return
            line = self._line(sys._getframe(1))
            if line is not None:
                self._known.add(name)
                self._send(FileOpened(rank=self._rank, time_ns=time.monotonic_ns(), path=name, line=line))

    def _is_ignored(self, name: str) -> bool:
        if name.startswith(self._ignored) or name.endswith((".lock", ".pyc")) or f"{os.sep}__pycache__{os.sep}" in name:
            return True
        return os.path.isdir(name)  # as tempfile names its folder before it opens a file of its own there

    def _line(self, frame: FrameType | None) -> str | None:
        """The line of the script that writes; None where it is Rankless that does, "" where no script is to be seen."""
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.partition(".")[0] == "rankless" and module != __name__:
                return None
            file = frame.f_code.co_filename
            if module != __name__ and not file.startswith("<") and not is_library(file):
                return f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        return ""
