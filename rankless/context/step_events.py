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

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol

from torch import Tensor, nn

from rankless.context.accumulation_passes import AccumulationPass
from rankless.errors import StepsDone

Parameters = ParamSpec("Parameters")


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


def to_all(event: Callable[Concatenate[Any, Parameters], None]) -> Callable[Concatenate[Any, Parameters], None]:
    """Return a method that sends an event, a method of a participant, to all `_participants`, in their order."""
    name = event.__name__

    def send(self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        for each in self._participants:
            getattr(each, name)(*args, **kwargs)

    return send


class StepEvents(StepParticipant):
    """Sends each event to all participants, in their order."""

    def __init__(self, participants: Iterable[StepParticipant] = ()) -> None:
        self._participants = tuple(participants)

    @property
    def compares_values(self) -> bool:
        """Whether a participant compares values with another run's."""
        return any(each.compares_values for each in self._participants)

    begin_pass = to_all(StepParticipant.begin_pass)
    begin_batch = to_all(StepParticipant.begin_batch)
    end_pass = to_all(StepParticipant.end_pass)
    begin_call = to_all(StepParticipant.begin_call)
    begin_capture = to_all(StepParticipant.begin_capture)
    end_call = to_all(StepParticipant.end_call)
    end_step = to_all(StepParticipant.end_step)
    close = to_all(StepParticipant.close)


class StepLimit(StepParticipant):
    """Counts training steps. All ranks make the same steps, so all stop at the same call."""

    def __init__(self, steps: int, *, at_end: Callable[[], None]) -> None:
        self._remaining = steps
        self._at_end = at_end

    def end_step(self, _job: ObservedJob) -> None:
        """Count a step of a job."""
        self.count_step()

    def count_step(self) -> None:
        """Count a step. At the last one and after it, call `at_end` and raise `StepsDone`."""
        self._remaining -= 1
        if self._remaining <= 0:
            self._at_end()
            raise StepsDone(0)
