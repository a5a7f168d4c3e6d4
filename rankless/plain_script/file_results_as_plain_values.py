"""What rank 0 sees of files, for ranks of other hosts, which need not have them."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class DistantEntry:
    """An entry of a folder of rank 0, with what `os.DirEntry` has.

    Args:
        folder: The folder, as the script gave it.
        fields: What `describe_entry` returned.
    """

    def __init__(self, folder: Any, fields: Sequence[Any]) -> None:
        self.name, self._inode, self._is_link, *self._kinds, status = fields
        self.path = os.path.join(folder, self.name)
        self._status = None if status is None else make_status(status)

    def __fspath__(self) -> str:
        return str(self.path)

    def inode(self) -> int:
        """Return its inode on rank 0's host."""
        return int(self._inode)

    def is_symlink(self) -> bool:
        """Return whether it is a symbolic link."""
        return bool(self._is_link)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a folder."""
        return bool(self._kinds[0 if follow_symlinks else 1])

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a file."""
        return bool(self._kinds[2 if follow_symlinks else 3])

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return its status on rank 0's host."""
        if self._status is None or (not follow_symlinks and self._is_link):
            return os.stat(self.path, follow_symlinks=follow_symlinks)
        return self._status


class DistantEntries:
    """What `os.scandir` returns, of rank 0."""

    def __init__(self, entries: Sequence[DistantEntry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[DistantEntry]:
        return self._entries

    def __next__(self) -> DistantEntry:
        return next(self._entries)

    def close(self) -> None:
        """Return no more entries."""
        self._entries = iter(())

    def __enter__(self) -> "DistantEntries":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def describe_status(status: os.stat_result) -> list[Any]:
    """Return the status of a file as plain values."""
    reduced: Any = status.__reduce__()  # as pickle reads it
    visible, others = reduced[1]
    return [list(visible), others]


def make_status(described: Sequence[Any]) -> os.stat_result:
    """Return the status of a file of plain values."""
    visible, others = described
    return os.stat_result(visible, others)


def describe_entry(entry: "os.DirEntry[Any]") -> list[Any]:
    """Return an entry of a folder as plain values."""
    try:
        status = describe_status(entry.stat())
    except OSError:  # a link to nothing
        status = None
    folders = [entry.is_dir(), entry.is_dir(follow_symlinks=False)]
    return [
        entry.name, entry.inode(), entry.is_symlink(), *folders,
        entry.is_file(), entry.is_file(follow_symlinks=False), status,
    ]  # fmt: skip


def describe_result(name: str, result: Any) -> Any:
    """Return what a function of `os` returned, as plain values."""
    if name in ("stat", "lstat"):
        return describe_status(result)
    return list(map(describe_entry, result)) if name == "scandir" else result


def make_result(name: str, described: Any, path: Any) -> Any:
    """Return what a function of `os` would return where rank 0 is."""
    if name in ("stat", "lstat"):
        return make_status(described)
    if name == "scandir":
        return DistantEntries([DistantEntry(path, fields) for fields in described])
    return described


def read_whole(open_file: Callable[..., Any], path: Any) -> bytes:
    """Return the data of a file, or raise what `open` raises."""
    with open_file(path, "rb") as file:
        data: bytes = file.read()
        return data
