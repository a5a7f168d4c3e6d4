"""What the participants of a run hear of its jobs and loaders.

Note [order of step events]: within one process the events come in this order.

1. A loader sends `begin_pass`, then `begin_batch` before the script gets a batch, and `end_pass` after the last batch.
   A loop that the script leaves has no `end_pass`. Passes of several loaders may overlap.
2. A job's call sends `begin_call`, then `begin_capture` each time that it captures its function, and `end_call` with
   its result. A call that raises has no `end_call`.
3. A train job sends `end_step` once its optimizers have made a step: after the `end_call` of the call that made it.
   With `accumulate=`, the step of the last calls of a pass comes without a call, before `end_pass`.
4. `close` comes once, when the process leaves the run or a participant ends it.

The participants hear each event in the order in which `runtime.process_context` lists them: recorders first, then the
progress meter, then those of extensions, last what may end the script. An event is no place to communicate with other
ranks. An exception of a participant is raised in the script.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from rankless.context.accumulation_passes import AccumulationPass


class ObservedJob(Protocol):
    """What participants may know of a job."""

    @property
    def name(self) -> str:
        """The name of its function."""
        ...

    @property
    def line(self) -> str:
        """The line of the script that defines it, such as "train.py:14"."""
        ...

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Its models by name."""
        ...


class StepParticipant:
    """Takes part in the steps of a run. A participant has the methods of the events that it wants to hear."""

    @property
    def compares_values(self) -> bool:
        """Whether it compares values with another run's: jobs show it whole gradients, and compute nothing twice."""
        return False

    def begin_pass(self, loader_pass: AccumulationPass, *, batches: int | None) -> None:
        """Hear that a pass over a loader begins, of so many batches (None if unknown)."""

    def begin_batch(self, loader_pass: AccumulationPass, *, rows: int) -> None:
        """Hear that the script is about to get the next batch of a pass, with so many rows on all ranks together."""

    def end_pass(self, loader_pass: AccumulationPass) -> None:
        """Hear that a pass has had its last batch."""

    def begin_call(self, job: ObservedJob) -> None:
        """Hear that a call of a job begins."""

    def begin_capture(self, job: ObservedJob) -> None:
        """Hear that a job captures its function."""

    def end_call(self, job: ObservedJob, result: Any, loss: Tensor | None) -> None:
        """Hear the whole result of a call, and the loss of a train job's: a 0-dim tensor."""

    def end_step(self, job: ObservedJob) -> None:
        """Hear that a train job's optimizers have made a step."""

    def close(self, *, stopped: bool) -> None:
        """Hear that the run ends: before its script has ended if `stopped`."""


class StepEvents(StepParticipant):
    """Sends each event to all participants, in their order."""

    def __init__(self, participants: Iterable[StepParticipant] = ()) -> None:
        self._participants = tuple(participants)

    @property
    def compares_values(self) -> bool:
        """Whether a participant compares values with another run's."""
        return any(each.compares_values for each in self._participants)

    def begin_pass(self, loader_pass: AccumulationPass, *, batches: int | None) -> None:
        """Send this event."""
        for each in self._participants:
            each.begin_pass(loader_pass, batches=batches)

    def begin_batch(self, loader_pass: AccumulationPass, *, rows: int) -> None:
        """Send this event."""
        for each in self._participants:
            each.begin_batch(loader_pass, rows=rows)

    def end_pass(self, loader_pass: AccumulationPass) -> None:
        """Send this event."""
        for each in self._participants:
            each.end_pass(loader_pass)

    def begin_call(self, job: ObservedJob) -> None:
        """Send this event."""
        for each in self._participants:
            each.begin_call(job)

    def begin_capture(self, job: ObservedJob) -> None:
        """Send this event."""
        for each in self._participants:
            each.begin_capture(job)

    def end_call(self, job: ObservedJob, result: Any, loss: Tensor | None) -> None:
        """Send this event."""
        for each in self._participants:
            each.end_call(job, result, loss)

    def end_step(self, job: ObservedJob) -> None:
        """Send this event."""
        for each in self._participants:
            each.end_step(job)

    def close(self, *, stopped: bool) -> None:
        """Send this event."""
        for each in self._participants:
            each.close(stopped=stopped)
