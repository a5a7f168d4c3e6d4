"""Makes progress records from the batches that loaders yield and the steps that train jobs make."""

import time
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from rankless.context.accumulation_passes import AccumulationPass
from rankless.context.step_events import ObservedJob, StepParticipant
from rankless.records.events import AnyRecord, Progress

RECORD_INTERVAL_SECONDS = 0.2
RATE_WINDOW_SECONDS = 5.0


class EpochMeter:
    """The progress of one pass over one loader."""

    def __init__(self, *, steps: int | None, now: float) -> None:
        self.steps = steps
        self.step = 0
        self.rows = 0
        """Rows that the loader has yielded and no job has trained on yet."""
        self.trained_rows = 0
        self.marks: deque[tuple[float, int]] = deque([(now, 0)])
        self.unrecorded: Callable[[], Progress] | None = None
        self._marked_at = now
        self._earlier_rate = 0.0

    def count_batch(self, rows: int) -> None:
        """Count a batch of so many rows, of all ranks together."""
        self.step += 1
        self.rows = rows

    def count_trained(self, now: float, *, is_timed: bool = True) -> tuple[int, float]:
        """Count the rows of the current batch as trained. A second job on the same batch counts nothing.

        Without `is_timed` the rate starts anew after this step: the step captured a job, or was the first of one. Until
        the next step it is the rate before.

        Returns:
            The rows, and the seconds since the last step or since the start of the pass.
        """
        rows, seconds = self.rows, now - self._marked_at
        self.trained_rows += rows
        self.rows, self._marked_at = 0, now
        if not is_timed:
            self._earlier_rate = self.samples_per_second
            self.marks.clear()
        self.marks.append((now, self.trained_rows))
        while len(self.marks) > 2 and self.marks[1][0] <= now - RATE_WINDOW_SECONDS:
            self.marks.popleft()
        return rows, seconds

    @property
    def samples_per_second(self) -> float:
        """The average over the last few seconds of this pass, without steps that captured a job."""
        (start, rows_before), (end, rows) = self.marks[0], self.marks[-1]
        return (rows - rows_before) / (end - start) if end > start else self._earlier_rate

    @property
    def seconds_left(self) -> float | None:
        """The time until the end of this pass at the present rate, or None if that is unknown."""
        if self.steps is None:
            return None
        rate = self.samples_per_second
        if self.step >= self.steps:
            return 0.0
        return (self.steps - self.step) * (self.trained_rows / self.step) / rate if rate > 0 else None


class ProgressMeter(StepParticipant):
    """Makes progress records of a script's train jobs: one per 0.2 s at most, and the last one of each epoch.

    Without `record` it makes none. After each step, `publish_totals` gets the calls of the train job that was called
    most often, rows and nanoseconds of the steps that captured no job, and the samples per second of the last seconds.

    Loaders report batches, train jobs report steps. It counts epochs per job, from 1: each pass over a loader in which
    the job trains is an epoch, whether the script makes its loader once or anew for every epoch.
    """

    def __init__(
        self,
        *,
        rank: int,
        record: Callable[[AnyRecord], None] | None,
        clock: Callable[[], int] = time.monotonic_ns,
        publish_totals: Callable[[int, int, int, float], None] = lambda *_totals: None,
    ) -> None:
        self._rank = rank
        self._publish_totals = publish_totals
        self._calls: dict[str, int] = {}
        self._timed_rows = 0
        self._timed_seconds = 0.0
        self._has_captured = False
        self._record = record
        self._clock = clock
        self._passes: MutableMapping[AccumulationPass, EpochMeter] = WeakKeyDictionary()
        self._current: EpochMeter | None = None
        self._pass_of_job: dict[str, EpochMeter] = {}
        self._epochs: dict[str, int] = {}
        self._recorded_at: float | None = None

    def begin_pass(self, loader_pass: AccumulationPass, *, batches: int | None) -> None:
        """Begin to measure a pass."""
        self._passes[loader_pass] = EpochMeter(steps=batches, now=self._seconds())

    def begin_batch(self, loader_pass: AccumulationPass, *, rows: int) -> None:
        """Count a batch that a loader yields in this pass."""
        self._current = self._passes[loader_pass]
        self._current.count_batch(rows)

    def end_call(self, job: ObservedJob, _result: Any, loss: Tensor | None) -> None:
        """Count a call of a train job."""
        if loss is not None:
            self.record_step(job=job.name, loss=lambda: float(loss))

    def record_step(self, *, job: str, loss: Callable[[], float]) -> None:
        """Count a step of a train job. Calls `loss`, which must not communicate, if a record is due."""
        now = self._seconds()
        epoch = self._epoch_of(job, now)
        self._count_step(job, epoch, now)
        if self._record is None:
            return
        last = epoch.steps is not None and epoch.step >= epoch.steps
        due = self._recorded_at is None or now - self._recorded_at >= RECORD_INTERVAL_SECONDS
        if last or due:
            epoch.unrecorded = None
            self._recorded_at = now
            self._record(self._make_record(job, epoch, loss, last=last))
        elif epoch.steps is None:
            epoch.unrecorded = lambda: self._make_record(job, epoch, loss, last=True)

    def begin_capture(self, _job: ObservedJob) -> None:
        """Exclude the time of the current step from all rates: it captures a job."""
        self._has_captured = True

    def end_pass(self, loader_pass: AccumulationPass) -> None:
        """End a pass. If its length was unknown, record its last step now."""
        epoch = self._passes.pop(loader_pass)
        if epoch.unrecorded is not None and self._record is not None:
            self._record(epoch.unrecorded())
            epoch.unrecorded = None
        if self._current is epoch:
            self._current = None

    def _count_step(self, job: str, epoch: EpochMeter, now: float) -> None:
        is_timed = job in self._calls and not self._has_captured
        self._has_captured = False
        self._calls[job] = self._calls.get(job, 0) + 1
        rows, seconds = epoch.count_trained(now, is_timed=is_timed)
        if is_timed:
            self._timed_rows += rows
            self._timed_seconds += seconds
        nanoseconds = round(self._timed_seconds * 1e9)
        self._publish_totals(max(self._calls.values()), self._timed_rows, nanoseconds, epoch.samples_per_second)

    def _epoch_of(self, job: str, now: float) -> EpochMeter:
        """Return the pass whose batch the job trains on, or without a loader one endless pass of the job's own."""
        epoch = self._current
        if epoch is None:
            known = self._pass_of_job.get(job)
            epoch = known if known is not None and known.steps is None else EpochMeter(steps=None, now=now)
            epoch.count_batch(0)
        if self._pass_of_job.get(job) is not epoch:
            self._pass_of_job[job] = epoch
            self._epochs[job] = self._epochs.get(job, 0) + 1
        return epoch

    def _make_record(self, job: str, epoch: EpochMeter, loss: Callable[[], float], *, last: bool) -> Progress:
        return Progress(
            rank=self._rank,
            time_ns=self._clock(),
            job=job,
            epoch=self._epochs[job],
            step=epoch.step,
            steps_per_epoch=epoch.steps,
            loss=loss(),
            samples_per_second=epoch.samples_per_second,
            seconds_left=epoch.seconds_left,
            last_of_epoch=last,
        )

    def _seconds(self) -> float:
        return self._clock() / 1e9
