"""Detects that several ranks write the same file, because a script's lines outside jobs run on every rank."""

import os

from rankless.records.events import FileOpened

MAX_WARNINGS = 3
_EVENTS = "events.out.tfevents."
MAX_TRACKED_FILES = 10_000

_FIX = "let one do it with rankless.once(…), save models with rankless.save, or put rankless.rank() into the name"
_FIX_WITHOUT_RANKLESS = "let one do it, where RANK is 0, or put the rank into the name"


class SharedFiles:
    """Tracks which rank writes which file."""

    def __init__(self, *, foreign: bool = False) -> None:
        self._fix = _FIX_WITHOUT_RANKLESS if foreign else _FIX
        self._writers: dict[str, int] = {}
        self._shared: set[str] = set()

    def check(self, record: FileOpened) -> str | None:
        """Return a warning when a second rank writes a file. Only MAX_WARNINGS files give one."""
        path = _name_of_all(record.path)
        first = self._writers.get(path)
        if first is None and len(self._writers) < MAX_TRACKED_FILES:
            self._writers[path] = record.rank
        if first is None or first == record.rank or path in self._shared or len(self._shared) >= MAX_WARNINGS:
            return None
        self._shared.add(path)
        low, high = sorted((first, record.rank))
        where = f" ({_shorten(record.line)})" if record.line else ""
        more = "" if len(self._shared) < MAX_WARNINGS else "; further files are not named"
        return f"ranks {low} and {high} both write {_shorten(path)}{where}: {self._fix}{more}"


def _name_of_all(path: str) -> str:
    """Return one name for the event files of TensorBoard in a folder, whose names differ from process to process."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{_EVENTS}*") if name.startswith(_EVENTS) else path


def _shorten(path: str) -> str:
    """Return a path relative to the current folder if it lies below it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
