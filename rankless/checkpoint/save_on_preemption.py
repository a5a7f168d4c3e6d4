"""A save before the end of a run that somebody outside has asked to stop."""

from collections.abc import Callable, Iterable
from typing import Any

from rankless.errors import CheckpointError
from rankless.records.events import PREEMPTED_EXIT_CODE

StepNumber = Callable[[], int]


def check_step(step: object) -> None:
    """Raise `CheckpointError` for a number by which nothing can be saved."""
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(
            expected="a step that is a whole number from 0 on",
            found=repr(step),
            fix="pass the number of steps trained so far",
        )


class Autosave:
    """Saves before the end of a run that somebody outside has asked to stop, and ends the script.

    It does so when a loop asks for its next batch: a step is over then, and none has begun.

    Args:
        is_stopping: Whether the run shall stop, with the same answer on all ranks.
        is_loader: Whether one of the saved objects is a `rankless.loader`.
        count: Returns the number of the step to save; None counts batches of the loader.
    """

    def __init__(
        self, *, is_stopping: Callable[[], bool], is_loader: Callable[[Any], bool], count: StepNumber | None
    ) -> None:
        if count is not None and not callable(count):
            raise CheckpointError(
                expected="True, False, or a function that returns the number of the step, as autosave=",
                found=repr(count),
                fix="pass autosave=True, or autosave=lambda: step",
            )
        self._is_stopping = is_stopping
        self._is_loader = is_loader
        self._count = count
        self._loader: Any = None
        self._first = 0
        """The number of the step before the first batch of the loader in this process."""

    def follow(self, objects: Iterable[Any], step: int, save: Callable[[int, bool], None]) -> None:
        """Save objects as they are at a later step. A call without a loader, after one with it, changes nothing.

        Args:
            objects: What `save` saves.
            step: The present step.
            save: Writes the objects as of a step, and gets whether no batch has followed since.

        Raises:
            CheckpointError: Not exactly one of the objects is a loader.
        """
        loaders = [each for each in objects if self._is_loader(each)]
        if not loaders and self._loader is not None:
            return
        if len(loaders) != 1:
            raise CheckpointError(
                expected="one rankless.loader among the objects, whose batches are the steps (autosave=)",
                found=f"{len(loaders)} of them",
                fix="pass that of the training as loader=…, or omit autosave= and save if rankless.stopping()",
            )
        if self._loader not in (None, loaders[0]):
            self._loader.before_step = lambda: None
        self._loader = loader = loaders[0]
        yielded = loader.yielded
        self._first = step - yielded

        def look() -> None:
            if self._is_stopping():
                save(self._find_step(), loader.yielded == yielded)
                raise SystemExit(PREEMPTED_EXIT_CODE)

        loader.before_step = look

    def require_step(self, step: int) -> None:
        """Raise `CheckpointError` if the script does not number its steps as `autosave` does."""
        if self._loader is not None and step != self._find_step():
            how = "as autosave=True counts batches of the loader" if self._count is None else "as autosave= returned"
            raise CheckpointError(
                expected=f"step {self._find_step()}, {how}",
                found=f"step {step}",
                fix="pass autosave=lambda: …, which returns the number that the script would save by",
            )

    def _find_step(self) -> int:
        step = self._first + self._loader.yielded if self._count is None else self._count()
        check_step(step)
        return int(step)
