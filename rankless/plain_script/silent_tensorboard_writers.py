"""Lets some writers of TensorBoard's events write nothing."""

from collections.abc import Callable
from typing import Any

FURTHER_FILES = ("add_embedding", "add_hparams")
"""These methods of a `SummaryWriter` write files beside the events."""


class SilentEventWriter:
    """Takes the place of the writer of event files behind a `SummaryWriter`, and writes nothing."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir

    def get_logdir(self) -> str:
        """Return the folder in which rank 0 writes."""
        return self._log_dir

    def _do_nothing(self, *_arguments: Any, **_keywords: Any) -> None:
        return

    add_event = add_summary = add_graph = add_onnx_graph = flush = close = reopen = _do_nothing


def silence_events(writer_class: Any, is_silent: Callable[[Any], bool]) -> None:
    """Change `SummaryWriter` so that those of its objects write no events for which `is_silent` returns True."""
    own_file_writer = writer_class._get_file_writer

    def get_file_writer(writer: Any) -> Any:
        if not is_silent(writer):
            return own_file_writer(writer)
        if writer.all_writers is None or writer.file_writer is None:
            writer.file_writer = SilentEventWriter(str(writer.log_dir))
            writer.all_writers = {writer.file_writer.get_logdir(): writer.file_writer}
        return writer.file_writer

    writer_class._get_file_writer = get_file_writer
