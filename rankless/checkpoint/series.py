"""A folder of checkpoints, one for each step that was saved: which stay, which is the last, which the best."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec

from rankless.checkpoint.files import peek
from rankless.checkpoint.folder import Draft, find_checkpoint, remove_checkpoint
from rankless.checkpoint.manifest import FORMAT, MANIFEST_NAME, Place
from rankless.errors import CheckpointError

Mode = Literal["min", "max"]
FOLDER_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
LEFTOVER_NAME = re.compile(r"\.(step-(?:0|[1-9][0-9]*))\.(?:new|old)")


class _Header(msgspec.Struct):
    """What one manifest tells about its place in the row."""

    format: str
    place: Place


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Which checkpoints stay: the last `keep_last` saved (None: all), and the `keep_best` of least or most metric."""

    keep_last: int | None = None
    keep_best: int = 0
    mode: Mode = "min"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint of the row."""

    path: Path
    place: Place


def check_keeping(keeping: Keeping) -> None:
    """Raise CheckpointError for what cannot be meant."""
    counts = {"keep_last": keeping.keep_last, "keep_best": keeping.keep_best}
    least = {"keep_last": 1, "keep_best": 0}
    for name, count in counts.items():
        if count is None and name == "keep_last":
            continue
        if not isinstance(count, int) or isinstance(count, bool) or count < least[name]:
            raise CheckpointError(
                expected=f"{name} of at least {least[name]}",
                found=repr(count),
                fix="pass the number of checkpoints to keep; leave keep_last out to keep all",
            )
    if keeping.mode not in get_args(Mode):
        raise CheckpointError(
            expected=f"a mode of {', '.join(get_args(Mode))}",
            found=repr(keeping.mode),
            fix='pass mode="min" where a smaller metric is better, as for a loss',
        )


class _OnDisk(NamedTuple):
    """A manifest that has not changed, as long as this has not."""

    folder: Path
    inode: int
    changed_ns: int


class Row:
    """The checkpoints in a folder, whatever else lies there; a manifest that has not changed is not read again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[_OnDisk, Place | None] = {}

    def entries(self) -> list[Entry]:
        """Those that are on disk now, in the order in which they were saved."""
        names = set()
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            leftover = LEFTOVER_NAME.fullmatch(path.name)
            names.add(leftover[1] if leftover else path.name)
        manifests = {name: self._manifest(name) for name in filter(FOLDER_NAME.fullmatch, names)}
        known, self._known = self._known, {}
        found = []
        for name, manifest in manifests.items():
            if manifest is None:
                continue
            place = known[manifest] if manifest in known else _read_place(manifest.folder)
            self._known[manifest] = place
            if place is not None:
                found.append(Entry(path=self.folder / name, place=place))
        return sorted(found, key=lambda entry: (entry.place.order, entry.place.step))

    def _manifest(self, name: str) -> _OnDisk | None:
        try:
            folder = find_checkpoint(self.folder / name)
            status = (folder / MANIFEST_NAME).stat()
        except (CheckpointError, OSError):
            return None
        return _OnDisk(folder, status.st_ino, status.st_mtime_ns)


def _read_place(folder: Path) -> Place | None:
    header = peek(folder, _Header)
    return header.place if header is not None and header.format == FORMAT else None


def best(row: list[Entry], *, mode: Mode) -> list[Entry]:
    """The checkpoints that have a metric, the best first; of two equal ones the earlier."""
    sign = 1 if mode == "min" else -1
    measured = [entry for entry in row if entry.place.metric is not None and not math.isnan(entry.place.metric)]
    return sorted(measured, key=lambda entry: (sign * (entry.place.metric or 0.0), entry.place.order))


@dataclass(frozen=True, kw_only=True)
class SeriesSave:
    """One save into a row: asked by the `Saver` on rank 0."""

    row: Row
    keeping: Keeping
    step: int
    metric: float | None

    def next_place(self) -> Place:
        """Behind all that are there now."""
        order = max((entry.place.order for entry in self.row.entries()), default=0) + 1
        return Place(order, self.step, self.metric)

    def tidy(self) -> None:
        """Remove the checkpoints that are not to be kept, and what killed saves have left."""
        row = self.row.entries()
        keep_last = len(row) if self.keeping.keep_last is None else self.keeping.keep_last
        kept = {entry.path for entry in row[-keep_last:]}
        kept |= {entry.path for entry in best(row, mode=self.keeping.mode)[: self.keeping.keep_best]}
        try:
            for entry in row:
                if entry.path not in kept:
                    remove_checkpoint(entry.path)
            for path in self.row.folder.iterdir():
                leftover = LEFTOVER_NAME.fullmatch(path.name)
                if leftover is not None:
                    Draft(self.row.folder / leftover[1]).discard()
        except OSError as error:
            raise CheckpointError(
                expected=f"to remove checkpoints of {self.row.folder} that are not to be kept",
                found=f"{type(error).__name__}: {error}",
                fix="make the folder writable; the new checkpoint is there",
            ) from error
