"""The checkpoints of a training run in one folder: which to keep, which is the latest, which the best."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec

from rankless.checkpoint.folder_commit import UncommittedCheckpoint, find_checkpoint, remove_checkpoint
from rankless.checkpoint.manifest import FORMAT, MANIFEST_NAME, SeriesPosition
from rankless.checkpoint.manifest_io import peek
from rankless.errors import CheckpointError

Mode = Literal["min", "max"]
FOLDER_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
LEFTOVER_NAME = re.compile(r"\.(step-(?:0|[1-9][0-9]*))\.(?:new|old)")


class _Header(msgspec.Struct):
    """The fields of a manifest that give its position in the run."""

    format: str
    position: SeriesPosition = msgspec.field(name="place")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints to keep: the last `keep_last` (None: all), and the `keep_best` of the best metric."""

    keep_last: int | None = None
    keep_best: int = 0
    mode: Mode = "min"


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint on disk."""

    path: Path
    position: SeriesPosition


def check_retention(retention: Retention) -> None:
    """Raise `CheckpointError` for invalid numbers or an invalid mode."""
    counts = {"keep_last": retention.keep_last, "keep_best": retention.keep_best}
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
    if retention.mode not in get_args(Mode):
        raise CheckpointError(
            expected=f"a mode of {', '.join(get_args(Mode))}",
            found=repr(retention.mode),
            fix='pass mode="min" if a smaller metric is better, as for a loss',
        )


class _OnDisk(NamedTuple):
    """Identifies a manifest: while this is equal, the manifest has not changed."""

    folder: Path
    inode: int
    changed_ns: int


class CheckpointDirectory:
    """The checkpoints in a folder, which may hold other files too. It reads an unchanged manifest only once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[_OnDisk, SeriesPosition | None] = {}

    def entries(self) -> list[SavedCheckpoint]:
        """Return the checkpoints that are on disk now, in the order in which they were saved."""
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
            position = known[manifest] if manifest in known else _read_position(manifest.folder)
            self._known[manifest] = position
            if position is not None:
                found.append(SavedCheckpoint(path=self.folder / name, position=position))
        return sorted(found, key=lambda entry: (entry.position.order, entry.position.step))

    def _manifest(self, name: str) -> _OnDisk | None:
        try:
            folder = find_checkpoint(self.folder / name)
            status = (folder / MANIFEST_NAME).stat()
        except (CheckpointError, OSError):
            return None
        return _OnDisk(folder, status.st_ino, status.st_mtime_ns)


def _read_position(folder: Path) -> SeriesPosition | None:
    header = peek(folder, _Header)
    return header.position if header is not None and header.format == FORMAT else None


def best(saved: list[SavedCheckpoint], *, mode: Mode) -> list[SavedCheckpoint]:
    """Return the checkpoints that have a metric, the best first. Of equal ones the earlier comes first."""
    sign = 1 if mode == "min" else -1
    measured = [entry for entry in saved if entry.position.metric is not None and not math.isnan(entry.position.metric)]
    return sorted(measured, key=lambda entry: (sign * (entry.position.metric or 0.0), entry.position.order))


@dataclass(frozen=True, kw_only=True)
class CheckpointSeries:
    """One save into a `CheckpointDirectory`; the `Saver` calls it on rank 0."""

    directory: CheckpointDirectory
    retention: Retention
    step: int
    metric: float | None

    def next_position(self) -> SeriesPosition:
        """Return the position after all checkpoints that are there now."""
        order = max((entry.position.order for entry in self.directory.entries()), default=0) + 1
        return SeriesPosition(order, self.step, self.metric)

    def find_latest(self) -> Path | None:
        """Return the folder of the checkpoint that was saved last; None if there is none."""
        saved = self.directory.entries()
        return saved[-1].path if saved else None

    def remove_expired(self) -> None:
        """Remove the checkpoints that are not to be kept, and what killed saves have left behind."""
        saved = self.directory.entries()
        keep_last = len(saved) if self.retention.keep_last is None else self.retention.keep_last
        kept = {entry.path for entry in saved[-keep_last:]}
        kept |= {entry.path for entry in best(saved, mode=self.retention.mode)[: self.retention.keep_best]}
        try:
            for entry in saved:
                if entry.path not in kept:
                    remove_checkpoint(entry.path)
            for path in self.directory.folder.iterdir():
                leftover = LEFTOVER_NAME.fullmatch(path.name)
                if leftover is not None:
                    UncommittedCheckpoint(self.directory.folder / leftover[1]).discard()
        except OSError as error:
            raise CheckpointError(
                expected=f"to remove old checkpoints in {self.directory.folder}",
                found=f"{type(error).__name__}: {error}",
                fix="make the folder writable; the new checkpoint is complete",
            ) from error
