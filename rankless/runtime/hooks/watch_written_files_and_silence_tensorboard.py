"""Watches which files a worker's script writes, and lets only rank 0 write the events of TensorBoard.

The agent warns if several ranks write the same file. Python calls an audit hook for every file that it opens.
`torch.save` opens its file in C++, so it is patched. The hook does not see what other C libraries write (safetensors,
HDF5, SQLite), nor what child processes of the script write.

Each rank calls `SummaryWriter(…)` and `add_scalar(…)`, since the script is written for one device. Without
`silence_writers` each rank would write an event file of its own into the same folder, and TensorBoard would draw every
curve several times. A writer whose `log_dir` or `comment` has the rank is the rank's own, and writes. Rank 0 is never
changed.
"""

import contextlib
import functools
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from rankless.config.process_configs import WorkerConfig
from rankless.plain_script.silent_tensorboard_writers import FURTHER_FILES, silence_events
from rankless.records.events import FileOpened
from rankless.user_code import display_name, is_library, script_line

_EVENTS = frozenset({"open", "os.rename"})
_WRITING = os.O_WRONLY | os.O_RDWR
_OWN = os.O_EXCL | os.O_DIRECTORY
"""The flags of files that no other process can have made, or that have no name, like temporary files."""
_MAX_FILES = 1000
_DEVICES = ("/dev/", "/proc/", "/sys/")
TENSORBOARD_WRITER = "torch.utils.tensorboard.writer"


def list_ignored(config: WorkerConfig) -> tuple[str, ...]:
    """Return the beginnings of the paths of devices, of caches that processes may share, and of the run's logs."""
    return (
        *_DEVICES,
        os.path.join(os.path.expanduser("~"), "."),
        os.path.join(tempfile.gettempdir(), "torchinductor"),
        os.path.dirname(os.path.abspath(config.log_file)) + os.sep,
    )


class FileWriteMonitor:
    """Sends one record for each file that this worker's script opens to write, append or replace."""

    def __init__(self, config: WorkerConfig, *, send: Callable[[FileOpened], None]) -> None:
        self.take_process(config)
        self._send = send
        self._reported: set[str] = set()
        self._ignored = list_ignored(config)

    def take_process(self, config: WorkerConfig) -> None:
        """Observe the files of this process as those of a worker."""
        self._rank, self._process_id = config.rank, config.process_id

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


def silence_writers(module: Any, *, rank: int, notify: Callable[[str], None]) -> None:
    """Patch `SummaryWriter` of `torch.utils.tensorboard.writer` on a rank that is not 0.

    Calls `notify` at the first writer that writes nothing.
    """
    writer = module.SummaryWriter
    own_init = writer.__init__
    notices = [notify]

    @functools.wraps(own_init)
    def init(self: Any, log_dir: Any = None, comment: str = "", *arguments: Any, **keywords: Any) -> None:
        self._rankless_is_silent = not names_rank(f"{log_dir or ''} {comment}", rank)
        if self._rankless_is_silent and notices:
            line = script_line(sys._getframe(1))
            notices.pop()(
                f"{line}: only rank 0 writes TensorBoard events, because every rank runs this line; for events of each "
                "rank put rankless.rank() into log_dir"
            )
        own_init(self, log_dir, comment, *arguments, **keywords)

    writer.__init__ = init
    silence_events(writer, lambda own: own._rankless_is_silent)
    for name in FURTHER_FILES:
        setattr(writer, name, _unless_silent(getattr(writer, name)))


def names_rank(text: str, rank: int) -> bool:
    """Whether a text has the rank as a number of its own, as "runs/rank1", "runs/1" and "_gpu1" have rank 1."""
    return (
        re.search(rf"(?:^|[^0-9a-z]|rank|worker|process|proc|gpu|device|local){rank}(?![0-9a-z])", text.lower())
        is not None
    )


def _unless_silent(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> None:
        if not self._rankless_is_silent:
            method(self, *arguments, **keywords)

    return call
