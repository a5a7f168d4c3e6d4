"""The checkpoint folder on disk: all ranks write it beside its target, and rank 0 commits it by renaming.

# Note [commit]: the new checkpoint is written and synced to disk as the sibling `.NAME.new`, its manifest last. Then
# rank 0 renames the old checkpoint to `.NAME.old` and the new one to `NAME`, and removes the old one. After a crash at
# any point, `NAME` is the old or the new checkpoint, or it is missing and `.NAME.old` is the old one.
# `find_checkpoint` and the next save look there.

# Note [files of ranks]: during a save no other collective may run beside the training's, so the ranks exchange messages
# through the folder. A rank that will write creates `rank-R.reserved` at the start, while all ranks wait for one
# another. When its file is on disk it writes the file's entry of the manifest there, and renames it to `rank-R.part`.
# If the write fails it removes it, which works on a full disk too. Rank 0 waits until no reservation is left.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import safetensors

from rankless.checkpoint.manifest import MANIFEST_NAME, TENSORS_NAME, TensorFile
from rankless.checkpoint.manifest_io import sync
from rankless.checkpoint.raise_on_all_ranks import OtherRankFailed
from rankless.errors import CheckpointError

STALL_TIMEOUT_SECONDS = 600.0
"""How long rank 0 waits for another rank's file while nothing in the folder grows."""
POLL_SECONDS = 0.005
_TOKEN_NAME = "token"


class UncommittedCheckpoint:
    """A checkpoint before its commit: the sibling of its target, with the messages between ranks."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder, self._old = _sibling_paths(target)

    def open(self, token: str) -> None:
        """Make the folder, on rank 0 before the others look. Raises `CheckpointError` if the target has other files."""
        with disk_errors(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            if not self.target.exists() and self._old.exists():
                self._old.rename(self.target)
            _refuse_other_files(self.target)
            _remove(self.folder)
            self.folder.mkdir()
            (self.folder / _TOKEN_NAME).write_text(token)

    def reserve(self, rank: int, token: str) -> None:
        """Reserve a file of rank `rank`. Raises `CheckpointError` if the folder is not the one that rank 0 made."""
        with disk_errors(self.target):
            try:
                found = (self.folder / _TOKEN_NAME).read_text()
            except FileNotFoundError:
                found = ""
            if found != token:
                raise CheckpointError(
                    expected=f"the folder {self.target.parent} to be the same for all ranks",
                    found=f"rank {rank} does not see there what rank 0 has written",
                    fix='save to a folder that all hosts share, or with layout="whole"',
                )
            self._reserved(rank).touch()

    def report_written(self, rank: int, file: TensorFile) -> None:
        """Tell rank 0 that this rank's file is on disk. Raises `CheckpointError` if rank 0 has failed."""
        self._require_rank_0()
        self._reserved(rank).write_bytes(msgspec.json.encode(file))
        self._reserved(rank).rename(self._part(rank))

    def report_failure(self, rank: int, because: BaseException) -> None:
        """Tell rank 0 that this rank failed. Raises `CheckpointError` if rank 0 has failed before."""
        try:
            self._require_rank_0()
        except CheckpointError as error:
            # This rank may have written while rank 0 removed the folder.
            shutil.rmtree(self.folder, ignore_errors=True)
            raise error from because
        self._reserved(rank).unlink(missing_ok=True)

    def collect_files(self, ranks: Sequence[int]) -> list[TensorFile]:
        """Return the other ranks' entries of the manifest when all their files are on disk, on rank 0."""
        waiting, seen, since = list(ranks), -1, time.monotonic()
        while waiting := [rank for rank in waiting if not self._is_written(rank)]:
            grown = self._size()
            if grown != seen:
                seen, since = grown, time.monotonic()
            if time.monotonic() - since > STALL_TIMEOUT_SECONDS:
                raise CheckpointError(
                    expected=f"rank {waiting[0]} to write its part of {self.target}",
                    found=f"no file has grown for {STALL_TIMEOUT_SECONDS:.0f} s",
                    fix=f"find out why rank {waiting[0]} hangs; the previous checkpoint is kept",
                )
            time.sleep(POLL_SECONDS)
        files = [msgspec.json.decode(self._part(rank).read_bytes(), type=TensorFile) for rank in ranks]
        for rank in ranks:
            self._part(rank).unlink()
        (self.folder / _TOKEN_NAME).unlink()
        return files

    def commit(self) -> None:
        """Rename the finished folder to its target."""
        _remove(self._old)
        if self.target.exists():
            self.target.rename(self._old)
        self.folder.rename(self.target)
        sync(self.target.parent)
        _remove(self._old)

    def discard(self) -> None:
        """Remove the folder, and leave or restore the previous checkpoint at the target."""
        with contextlib.suppress(OSError):
            if not self.target.exists() and self._old.exists():
                self._old.rename(self.target)
            # The token goes first, so that a rank whose file then vanishes knows why.
            (self.folder / _TOKEN_NAME).unlink(missing_ok=True)
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.target.exists():
                shutil.rmtree(self._old, ignore_errors=True)

    def _require_rank_0(self) -> None:
        if not (self.folder / _TOKEN_NAME).exists():
            raise self._failure_of(0)

    def _size(self) -> int:
        size = 0
        for entry in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # renamed in the meantime
                size += entry.stat().st_size
        return size

    def _is_written(self, rank: int) -> bool:
        if self._part(rank).exists():
            return True
        if self._reserved(rank).exists():
            return False
        # A second look: it may have been renamed between the first two.
        if not self._part(rank).exists():
            raise self._failure_of(rank)
        return True

    def _failure_of(self, rank: int) -> OtherRankFailed:
        return OtherRankFailed(
            expected=f"rank {rank} to write its part of {self.target}",
            found="it failed; its own error says why",
            fix=f"fix the cause on rank {rank}; the previous checkpoint is kept",
        )

    def _reserved(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.reserved"

    def _part(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.part"


@contextlib.contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Raise errors of the disk as a `CheckpointError` that names the target."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            expected=f"to write a checkpoint at {target}",
            found=f"{type(error).__name__}: {error}",
            fix="free space there, or save to another folder; the previous checkpoint is kept",
        ) from error


def resolve_target(path: str | os.PathLike[str]) -> Path:
    """Return the folder that a save to `path` writes. It follows a link, so that a link stays a link."""
    target = Path(os.path.realpath(path))
    if not target.name:
        raise CheckpointError(
            expected="the path of a checkpoint", found=os.fspath(path), fix="save to a folder of its own"
        )
    return target


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the folder to read for `path`: itself, or the old one that a killed save has renamed."""
    target = resolve_target(path)
    _, old = _sibling_paths(target)
    if not target.exists() and (old / MANIFEST_NAME).exists():
        return old
    if not target.is_dir():
        raise CheckpointError(
            expected=f"a checkpoint folder at {target}",
            found="a file" if target.exists() else "nothing there",
            fix="pass the path of rankless.save",
        )
    return target


def remove_checkpoint(target: Path) -> None:
    """Remove a committed checkpoint. A crash on the way leaves nothing that looks like a checkpoint."""
    folder, _ = _sibling_paths(target)
    _remove(folder)
    target.rename(folder)
    _remove(folder)


def _sibling_paths(target: Path) -> tuple[Path, Path]:
    return target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")


def _refuse_other_files(target: Path) -> None:
    """Raise unless `target` is free, empty, or a checkpoint, because the save removes what is there."""
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(
            expected=f"a folder to save to at {target}",
            found="a file",
            fix="save to another path, or remove it",
        )
    names = {entry.name for entry in target.iterdir()}
    foreign = sorted(name for name in names - {MANIFEST_NAME} if TENSORS_NAME.fullmatch(name) is None)
    if foreign or (names and MANIFEST_NAME not in names):
        raise CheckpointError(
            expected=f"a checkpoint, an empty folder or nothing at {target}",
            found=f"a folder with {', '.join((foreign or sorted(names))[:5])}",
            fix="save to another path, because a save replaces the whole folder",
        )


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
