"""Reports which files a worker's script writes, so that the agent can warn if several ranks write the same file.

Python calls an audit hook for every file that it opens. `torch.save` opens its file in C++, so it is patched. The hook
does not see what other C libraries write (safetensors, HDF5, SQLite), nor what child processes of the script write.
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
from rankless.user_code import display_name, is_library

_EVENTS = frozenset({"open", "os.rename"})
_WRITING = os.O_WRONLY | os.O_RDWR
_OWN = os.O_EXCL | os.O_DIRECTORY
"""The flags of files that no other process can have made, or that have no name, like temporary files."""
_MAX_FILES = 1000
_DEVICES = ("/dev/", "/proc/", "/sys/")


class FileWriteMonitor:
    """Sends one record for each file that this worker's script opens to write, append or replace."""

    def __init__(self, config: WorkerConfig, *, send: Callable[[FileOpened], None]) -> None:
        self._rank = config.rank
        self._process_id = config.process_id
        self._send = send
        self._reported: set[str] = set()
        home, temporary = os.path.expanduser("~"), tempfile.gettempdir()
        # Caches of libraries, which several processes may use at once, and the run's own logs.
        self._ignored = (
            *_DEVICES,
            os.path.join(home, "."),
            os.path.join(temporary, "torchinductor"),
            os.path.dirname(os.path.abspath(config.log_file)) + os.sep,
        )

    def start(self) -> None:
        """Observe from now on, until the process ends."""

        # Local names: Python calls the hook to the very end, when the globals of this module may be gone.
        events, writing, own, report_write = _EVENTS, _WRITING, _OWN, self.report_write

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in events:  # nearly always
                return
            if event == "os.rename":
                report_write(arguments[1])
            elif arguments[2] & writing and not arguments[2] & own:
                report_write(arguments[0])

        sys.addaudithook(hook)

    def patch_torch_save(self, serialization: Any) -> None:
        """Patch `torch.save`, given `torch.serialization`."""
        save = serialization.save

        @functools.wraps(save)
        def observed_save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            self.report_write(f)
            save(obj, f, *args, **kwargs)

        serialization.save = sys.modules["torch"].save = observed_save  # type: ignore[attr-defined]  # torch's own name

    def report_write(self, path: Any) -> None:
        """Send a record of a written file, if it has a name and is not one of Rankless."""
        if not isinstance(path, str | bytes | os.PathLike) or len(self._reported) >= _MAX_FILES:
            return
        with contextlib.suppress(Exception):  # an odd path is for the script's own `open` to refuse
            name = os.path.abspath(os.fsdecode(path))
            if name in self._reported or os.getpid() != self._process_id or self._is_ignored(name):
                return
            line = self._find_line(sys._getframe(1))
            if line is not None:
                self._reported.add(name)
                self._send(FileOpened(rank=self._rank, time_ns=time.monotonic_ns(), path=name, line=line))

    def _is_ignored(self, name: str) -> bool:
        if name.startswith(self._ignored) or name.endswith((".lock", ".pyc")) or f"{os.sep}__pycache__{os.sep}" in name:
            return True
        return os.path.isdir(name)  # tempfile names its folder before it opens a file in it

    def _find_line(self, frame: FrameType | None) -> str | None:
        """Return the line of the script that writes, None if Rankless writes, or "" if no script is on the stack."""
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.partition(".")[0] == "rankless" and module != __name__:
                return None
            file = frame.f_code.co_filename
            if module != __name__ and not file.startswith("<") and not is_library(file):
                return f"{display_name(file)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""
