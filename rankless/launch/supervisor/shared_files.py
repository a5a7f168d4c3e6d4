"""Noticing that several ranks write one file: a script's lines outside jobs run on every rank."""

import os

from rankless.records.events import FileOpened

MOST_NOTICES = 3
MOST_FILES = 10_000

_FIX = "let one do it with rankless.once(…), save models with rankless.save, or put rankless.rank() into the name"
_FIX_APART = "let one do it, where RANK is 0, or put the rank into the name"


class SharedFiles:
    """Which rank writes which file, as the records tell."""

    def __init__(self, *, foreign: bool = False) -> None:
        self._fix = _FIX_APART if foreign else _FIX
        self._writers: dict[str, int] = {}
        self._shared: set[str] = set()

    def notice(self, record: FileOpened) -> str | None:
        """What to tell the user when a second rank writes a file; None otherwise, and for the fourth file on."""
        first = self._writers.get(record.path)
        if first is None and len(self._writers) < MOST_FILES:
            self._writers[record.path] = record.rank
        if first is None or first == record.rank or record.path in self._shared or len(self._shared) >= MOST_NOTICES:
            return None
        self._shared.add(record.path)
        low, high = sorted((first, record.rank))
        where = f" ({_short(record.line)})" if record.line else ""
        more = "" if len(self._shared) < MOST_NOTICES else "; further files are not named"
        return f"ranks {low} and {high} both write {_short(record.path)}{where}: {self._fix}{more}"


def _short(path: str) -> str:
    """A path as a user would name it here."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
