"""`Checkpoints`: the checkpoints of a training run in one folder, as a script saves and resumes them."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankless.checkpoint.checkpoint_series import (
    CheckpointDirectory,
    CheckpointSeries,
    Retention,
    SavedCheckpoint,
    best,
    check_retention,
)
from rankless.checkpoint.loading import load
from rankless.checkpoint.raise_on_all_ranks import Agreement
from rankless.checkpoint.save_on_preemption import Autosave, check_step
from rankless.checkpoint.saving import SaveOptions, Saver
from rankless.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What `Checkpoints.load` has restored.

    Attributes:
        step (int): The step that was saved.
        metric (float | None): Its metric; None if it had none.
        extra (Any): The `extra` of the save; None if there was none.
    """

    step: int
    metric: float | None
    extra: Any


@dataclass(frozen=True, kw_only=True)
class RunFunctions:
    """What checkpoints use of the run."""

    find_saver: Callable[[], Saver]
    """Returns what saves at present."""
    notify: Callable[[str], None]
    """Shows the user a notice."""
    prepare_load: Callable[[Iterable[Any]], None] = lambda _objects: None
    """Called on all ranks with the objects of a load, before anything is read."""
    report_load: Callable[[int], None] = lambda _step: None
    """Called with the step of a checkpoint that was loaded."""


class Checkpoints:
    """The checkpoints of one training run, each in `FOLDER/step-STEP`.

    `rankless.checkpoints` makes it. Call every method on every rank. When a new checkpoint is on disk, those that are
    not to be kept are removed. `latest`, `best` and `steps` read the disk: call `wait` first to include a background
    save.

    Attributes:
        folder (Path): The folder of all checkpoints.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> checkpoints = rankless.checkpoints("run", keep_last=1, keep_best=1)
        >>> for step, loss in [(1, 0.5), (2, 0.1), (3, 0.2)]:
        ...     checkpoints.save(step, metric=loss, model=model)
        >>> checkpoints.steps
        [2, 3]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        retention: Retention,
        options: SaveOptions,
        run: RunFunctions,
        autosave: Autosave | None = None,
    ) -> None:
        check_retention(retention)
        self.folder = Path(os.path.realpath(folder))
        self._directory = CheckpointDirectory(self.folder)
        self._retention = retention
        self._options = options
        self._run = run
        self._autosave = autosave

    def save(self, step: int, *, metric: Any = None, extra: Any = None, **objects: Any) -> None:
        """Write the state of objects and of all random number generators, as of `step`.

        Args:
            step: Number of steps trained so far, from 0.
            metric: A number to compare checkpoints by; required with `keep_best`. Default: none.
            extra: Plain data for `Restored.extra`: numbers, text, lists, dicts, tensors.
            **objects: What to save, by name: modules, optimizers, schedulers, loaders, anything with a `state_dict`.

        Raises:
            CheckpointError: As `rankless.save` raises it, or for an invalid step or a missing metric.

        Example:
            >>> model = torch.nn.Linear(3, 1)
            >>> checkpoints = rankless.checkpoints("run")
            >>> checkpoints.save(100, metric=0.5, model=model)
        """
        number = None if metric is None else float(metric)
        check_step(step)
        if number is None and self._retention.keep_best:
            raise CheckpointError(
                expected="a metric to choose the best checkpoints by",
                found="none",
                fix="pass metric=…, or leave out keep_best",
            )
        if self._autosave is not None:
            self._autosave.require_step(step)
        self._write(step, number, extra, objects)
        self._follow(step, number, extra, objects)

    def _write(self, step: int, metric: float | None, extra: Any, objects: dict[str, Any]) -> None:
        self._run.find_saver().save(
            self.folder / f"step-{step}",
            objects,
            options=SaveOptions(layout=self._options.layout, background=self._options.background, extra=extra),
            series=CheckpointSeries(directory=self._directory, retention=self._retention, step=step, metric=metric),
        )

    def _follow(self, step: int, metric: float | None, extra: Any, objects: dict[str, Any]) -> None:
        """Let the script's next step be preceded by a save, if the run shall stop by then."""
        if self._autosave is None:
            return

        def save(number: int, is_unchanged: bool) -> None:
            # Also if this step was saved: lines after that save may have changed something.
            self._write(number, metric if is_unchanged else None, extra, objects)
            self._run.find_saver().wait()
            self._run.notify(f"the run was asked to stop: {self.folder / f'step-{number}'} has its state")

        self._autosave.follow(objects.values(), step, save)

    def load(
        self, which: str | int = "latest", *, strict: bool = True, random: bool = True, **objects: Any
    ) -> Restored | None:
        """Restore the state of objects from one of the checkpoints.

        Args:
            which: "latest", "best", or a step.
            strict: As in `rankless.load`.
            random: As in `rankless.load`.
            **objects: What to restore, under the names of the save.

        Returns:
            Step, metric and extra data of the checkpoint; None if there is no checkpoint yet.

        Raises:
            CheckpointError: As `rankless.load` raises it, or for a step that is not kept.

        Example:
            >>> model = torch.nn.Linear(3, 1)
            >>> checkpoints = rankless.checkpoints("run")
            >>> checkpoints.load(model=model) is None
            True
            >>> checkpoints.save(100, model=model)
            >>> checkpoints.load(model=model).step
            100
        """
        saver = self._run.find_saver()
        saver.wait()
        restored: Restored | None = saver.run_for_all(
            lambda: self._restore(saver, which, objects, strict=strict, random=random)
        )
        if restored is not None:
            self._run.report_load(restored.step)
        at = restored or Restored(step=0, metric=None, extra=None)
        self._follow(at.step, at.metric, at.extra, objects)
        return restored

    def _restore(
        self, saver: Saver, which: str | int, objects: dict[str, Any], *, strict: bool, random: bool
    ) -> Restored | None:
        fix = "let all hosts share the folder, or copy it to each of them"
        with Agreement(mesh=saver.mesh, doing=f"look for a checkpoint in {self.folder}", fix=fix) as agreement:
            found = self._find(which)
            agreement.summary = "none is there" if found is None else f"step {found.position.step} is there"
        if found is None:
            return None
        self._run.prepare_load(objects.values())
        loaded = load(found.path, objects, mesh=saver.mesh, owner=saver.owner, strict=strict, random=random)
        if loaded.left_out:
            self._run.notify(f"loading {found.path} left out:\n{loaded.left_out}")
        return Restored(step=found.position.step, metric=found.position.metric, extra=loaded.extra)

    def wait(self) -> None:
        """Return when no background save is running.

        Raises:
            CheckpointError: The last background save failed. Every rank raises.

        Example:
            >>> rankless.checkpoints("run", background=True).wait()
        """
        self._run.find_saver().wait()

    @property
    def latest(self) -> Path | None:
        """The folder of the checkpoint saved last; None if there is none.

        Example:
            >>> checkpoints = rankless.checkpoints("run")
            >>> checkpoints.save(100, model=torch.nn.Linear(3, 1))
            >>> checkpoints.latest.name
            'step-100'
        """
        saved = self._directory.entries()
        return saved[-1].path if saved else None

    @property
    def best(self) -> Path | None:
        """The folder of the checkpoint with the best metric; None if there is none.

        Example:
            >>> rankless.checkpoints("run").best is None
            True
        """
        saved = best(self._directory.entries(), mode=self._retention.mode)
        return saved[0].path if saved else None

    @property
    def steps(self) -> list[int]:
        """The steps that are kept, in the order in which they were saved.

        Example:
            >>> rankless.checkpoints("run").steps
            []
        """
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
