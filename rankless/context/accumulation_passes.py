"""Passes over loaders, for jobs that accumulate several calls into one optimizer step.

Note [the last step of a pass]: with `accumulate=4` and ten batches the last step has two calls. The end of the pass
makes that step. If the loader knows its number of batches and the job is called once per batch, the last call makes the
step. Then whatever the script does after each step, such as a scheduler, follows inside its loop. A pass that the
script leaves early has no end. Its calls accumulate with those of the next pass, and Rankless warns the user.
"""

import weakref
from collections.abc import Callable
from typing import Protocol


class AccumulatingJob(Protocol):
    """A job that may hold calls without a step."""

    def on_pass_end(self, ended: "AccumulationPass") -> None:
        """Make the step, if the held calls belong to this pass."""
        ...

    def unfinished_calls(self) -> str | None:
        """Return a text that describes the held calls, or None without any."""
        ...


class AccumulationPass:
    """One pass over a loader: the number of the current batch, of a number of batches (None if unknown)."""

    def __init__(self, *, number: int, batches: int | None) -> None:
        self.number = number
        self.batches = batches
        self.batch = 0

    @property
    def is_last_batch(self) -> bool:
        """Whether the current batch is known to be the last one."""
        return self.batches is not None and self.batch >= self.batches


class LoaderPasses:
    """The passes of a script. Loaders report batches and ends; jobs ask in which pass they are called."""

    def __init__(self) -> None:
        self._started = 0
        # A loop that the script leaves early drops its generator and with it the pass. Only living passes matter.
        self._living: weakref.WeakSet[AccumulationPass] = weakref.WeakSet()
        self._jobs: weakref.WeakSet[AccumulatingJob] = weakref.WeakSet()

    def begin(self, *, batches: int | None) -> AccumulationPass:
        """Start a pass over a loader of so many batches."""
        self._started += 1
        return AccumulationPass(number=self._started, batches=batches)

    def start_batch(self, current: AccumulationPass) -> None:
        """Note that the loader is about to yield the next batch of this pass."""
        current.batch += 1
        self._living.add(current)

    def end(self, ended: AccumulationPass) -> None:
        """End a pass that has yielded all its batches: jobs that hold calls of it make their step."""
        self._living.discard(ended)
        for job in list(self._jobs):
            job.on_pass_end(ended)

    def current_pass(self) -> AccumulationPass | None:
        """Return the pass in which the script is: of several the one that started first, None without a loader."""
        return min(self._living, key=lambda item: item.number, default=None)

    def subscribe(self, job: AccumulatingJob) -> None:
        """Notify this job of the ends of passes from now on."""
        self._jobs.add(job)

    @property
    def have_unfinished_calls(self) -> bool:
        """Whether a job holds calls without a step."""
        return any(job.unfinished_calls() is not None for job in self._jobs)

    def warn_unfinished(self, notify: Callable[[str], None]) -> None:
        """Warn about calls without a step, at the end of the script."""
        for job in list(self._jobs):
            unfinished = job.unfinished_calls()
            if unfinished is not None:
                notify(unfinished)
