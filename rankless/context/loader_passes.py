"""Passes over loaders, as far as jobs that gather several calls into a step must know of them.

Note [the last group]: with `accumulate=4` and ten batches the last step has two calls. A pass's end makes that step. If
the loader knows how many batches there are and the job is called once per batch, the last call makes it, so that what
a script does after each step (a scheduler) follows in its loop. A pass that the script leaves early has no end: its
calls go on to be gathered with those of the next pass, and the user is told.
"""

import weakref
from collections.abc import Callable
from typing import Protocol


class AccumulatingJob(Protocol):
    """A job that may hold calls for which no step has been made."""

    def on_pass_end(self, ended: "LoaderPass") -> None:
        """Make the step, if the calls held belong to this pass."""
        ...

    def unfinished_calls(self) -> str | None:
        """What is held, in words; None if nothing is."""
        ...


class LoaderPass:
    """One pass over a loader: the number of the batch handed out last, of so many (None: not known)."""

    def __init__(self, *, number: int, batches: int | None) -> None:
        self.number = number
        self.batches = batches
        self.batch = 0

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch handed out last is known to be the last one."""
        return self.batches is not None and self.batch >= self.batches


class LoaderPasses:
    """The passes of a script. Loaders tell of batches and ends; jobs ask which pass they are called in."""

    def __init__(self) -> None:
        self._begun = 0
        # A loop that is left early drops its generator, and with it the pass: only the living are of interest.
        self._living: weakref.WeakSet[LoaderPass] = weakref.WeakSet()
        self._jobs: weakref.WeakSet[AccumulatingJob] = weakref.WeakSet()

    def begin(self, *, batches: int | None) -> LoaderPass:
        """A pass over a loader of so many batches."""
        self._begun += 1
        return LoaderPass(number=self._begun, batches=batches)

    def start_batch(self, current: LoaderPass) -> None:
        """The loader is about to hand out a batch of this pass."""
        current.batch += 1
        self._living.add(current)

    def end(self, ended: LoaderPass) -> None:
        """A pass has handed out all its batches: jobs that hold calls of it make their step."""
        self._living.discard(ended)
        for job in list(self._jobs):
            job.on_pass_end(ended)

    def current_pass(self) -> LoaderPass | None:
        """The pass in which the script is now: of nested or parallel ones the first begun; None without a loader."""
        return min(self._living, key=lambda item: item.number, default=None)

    def subscribe(self, job: AccumulatingJob) -> None:
        """Tell this job of ends of passes from now on."""
        self._jobs.add(job)

    def warn_unfinished(self, notify: Callable[[str], None]) -> None:
        """The script is over: say which calls were left without a step."""
        for job in list(self._jobs):
            waiting = job.unfinished_calls()
            if waiting is not None:
                notify(waiting)
