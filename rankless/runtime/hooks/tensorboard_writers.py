"""Lets only rank 0 write TensorBoard events, in a script that all ranks run as one.

Each rank calls `SummaryWriter(…)` and `add_scalar(…)`, since the script is written for one device. Without this hook
each rank would write an event file of its own into the same folder, and TensorBoard would draw every curve several
times. A writer whose `log_dir` or `comment` has the rank is the rank's own, and writes. Rank 0 is never changed.
"""

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

from rankless.user_code import script_line

MODULE = "torch.utils.tensorboard.writer"
_ADD_FILES = ("add_embedding", "add_hparams")
"""These write further files, beside the events."""


class SilentFileWriter:
    """Takes the place of the file writer behind a `SummaryWriter`, and writes nothing."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir

    def get_logdir(self) -> str:
        """Return the folder in which rank 0 writes."""
        return self._log_dir

    def _do_nothing(self, *_arguments: Any, **_keywords: Any) -> None:
        return

    add_event = add_summary = add_graph = add_onnx_graph = flush = close = reopen = _do_nothing


def silence_writers(module: Any, *, rank: int, notify: Callable[[str], None]) -> None:
    """Patch `SummaryWriter` of `torch.utils.tensorboard.writer` on a rank that is not 0.

    Calls `notify` at the first writer that writes nothing.
    """
    writer = module.SummaryWriter
    own_init, own_file_writer = writer.__init__, writer._get_file_writer
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

    @functools.wraps(own_file_writer)
    def get_file_writer(self: Any) -> Any:
        if not self._rankless_is_silent:
            return own_file_writer(self)
        if self.all_writers is None or self.file_writer is None:
            self.file_writer = SilentFileWriter(str(self.log_dir))
            self.all_writers = {self.file_writer.get_logdir(): self.file_writer}
        return self.file_writer

    writer.__init__, writer._get_file_writer = init, get_file_writer
    for name in _ADD_FILES:
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
