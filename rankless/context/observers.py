"""The observers that a run may attach to its jobs: recorders for `rankless verify` and `rankless plan`.

Jobs and loaders call them through these protocols, so that they import no recorder.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor


class CompiledProgramRecorder(Protocol):
    """Receives the program of each job, for `rankless plan`."""

    def record(self, job: Any, local: Any) -> None:
        """Record the program of one job."""
        ...

    def run(self, job: Any, bound: Any, values: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        """Run a program of a job, and measure the memory that it takes in its first call."""
        ...

    def finish(self, known: Iterable[Any]) -> None:
        """Record which jobs exist, and close."""
        ...


class CallInspector(Protocol):
    """Records every value of one job call, so that `rankless verify` can name the first value that differs."""

    def count_call(self, job: str) -> bool:
        """Count a call of a job, and return whether it is the call to inspect."""
        ...

    def instrument(self, program: Any, world: Any) -> Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]:
        """Return a placed program that also records its values."""
        ...

    def run_alongside(self, job: Any, world: Any, arguments: Any) -> None:
        """Record the values of the call on one worker, without side effects."""
        ...

    def record_plain(self, job: Any, result: Any) -> None:
        """Record the results of the plain call on one worker."""
        ...
