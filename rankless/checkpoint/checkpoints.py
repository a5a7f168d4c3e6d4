"""`Checkpoints`: a row of checkpoints in one folder, as a training script saves and resumes them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankless.checkpoint.collective_errors import Agreement
from rankless.checkpoint.loading import load
from rankless.checkpoint.retention import (
    CheckpointDirectory,
    DirectoryHistory,
    Retention,
    SavedCheckpoint,
    best,
    check_retention,
)
from rankless.checkpoint.saving import SaveOptions, Saver
from rankless.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What `Checkpoints.load` has read: the step that was saved, its metric if it had one, and its extra data."""

    step: int
    metric: float | None
    extra: Any


class Checkpoints:
    """The checkpoints of one training, each in `FOLDER/step-STEP`; those not to be kept go once a new one is there.

    Every method is called on every rank. `latest`, `best` and `steps` tell what is on disk now: call `wait` before
    if a save in the background is to count.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        retention: Retention,
        options: SaveOptions,
        saver: Callable[[], Saver],
        notify: Callable[[str], None],
    ) -> None:
        check_retention(retention)
        self.folder = Path(os.path.realpath(folder))
        self._directory = CheckpointDirectory(self.folder)
        self._retention = retention
        self._options = options
        self._saver = saver
        self._notify = notify

    def save(self, step: int, *, metric: Any = None, extra: Any = None, **objects: Any) -> None:
        """Write the state of `objects` as of `step`; `metric` is a number, needed to keep the best."""
        number = None if metric is None else float(metric)
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise CheckpointError(
                expected="a step that is a whole number from 0 on",
                found=repr(step),
                fix="pass the steps trained so far",
            )
        if number is None and self._retention.keep_best:
            raise CheckpointError(
                expected="a metric to choose the best checkpoints by",
                found="none",
                fix="pass metric=…, or leave out keep_best",
            )
        self._saver().save(
            self.folder / f"step-{step}",
            objects,
            options=SaveOptions(layout=self._options.layout, background=self._options.background, extra=extra),
            history=DirectoryHistory(directory=self._directory, retention=self._retention, step=step, metric=number),
        )

    def load(
        self, which: str | int = "latest", *, strict: bool = True, random: bool = True, **objects: Any
    ) -> Restored | None:
        """`Restored` from the "latest" checkpoint, the "best" or that of a step; None if there is none at all yet.

        The objects, and the random generators unless `random` is False, are then as they were when it was saved.
        Raises CheckpointError as `rankless.load` does.
        """
        saver = self._saver()
        saver.wait()
        fix = "let all hosts share the folder, or copy it to each"
        with Agreement(mesh=saver.mesh, doing=f"look for a checkpoint in {self.folder}", fix=fix) as agreement:
            found = self._find(which)
            agreement.summary = "none is there" if found is None else f"step {found.position.step} is there"
        if found is None:
            return None
        loaded = load(found.path, objects, mesh=saver.mesh, strict=strict, random=random)
        if loaded.left_out:
            self._notify(f"loading {found.path} left out:\n{loaded.left_out}")
        return Restored(step=found.position.step, metric=found.position.metric, extra=loaded.extra)

    def wait(self) -> None:
        """Return when no save is in flight; raises the error of the last one in the background, on every rank."""
        self._saver().wait()

    @property
    def latest(self) -> Path | None:
        """The checkpoint that was saved last."""
        saved = self._directory.entries()
        return saved[-1].path if saved else None

    @property
    def best(self) -> Path | None:
        """The checkpoint of the best metric."""
        saved = best(self._directory.entries(), mode=self._retention.mode)
        return saved[0].path if saved else None

    @property
    def steps(self) -> list[int]:
        """The steps that are kept, in the order in which they were saved."""
        return [entry.position.step for entry in self._directory.entries()]

    def _find(self, which: str | int) -> SavedCheckpoint | None:
        saved = self._directory.entries()
        if which == "latest":
            return saved[-1] if saved else None
        if which == "best":
            measured = best(saved, mode=self._retention.mode)
            return measured[0] if measured else None
        for entry in saved:
            if entry.position.step == which:
                return entry
        raise CheckpointError(
            expected=f'"latest", "best" or a step that is kept: {", ".join(map(str, self.steps)) or "none"}',
            found=repr(which),
            fix="pass one of them",
        )
