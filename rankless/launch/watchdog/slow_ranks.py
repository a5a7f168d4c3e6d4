"""Finds ranks that take longer than others for their part of a step, so that all wait for them.

Note [slow ranks]: ranks make their steps together, so all of them take as long for a step as the slowest one. A rank's
own part is the time of its steps without the time that it is in collectives, where faster ranks wait. Each host's agent
measures its ranks over some seconds, from the counters in their status pages. Host 0's agent compares all of them.
"""

import datetime
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rankless.records.events import AnyRecord, Exited, Notice, SlowRank, SlowRankChanged, Started, StepTimes
from rankless.records.parallel_plan import PlannedAxis
from rankless.records.worker_status import WorkerStatus, read_page

PERIOD_SECONDS = 5.0
"""The shortest time over which a rank is measured."""
LEAST_STEPS = 4
"""The fewest steps over which it is."""
INTERVAL_SECONDS = 1.0
"""Between two looks at the counters."""
SLOW_FACTOR = 1.3
"""A slow rank takes so many times as long as others."""
LEAST_SHARE = 0.1
"""A slow rank makes all steps longer by this share of a step at least."""
PERIODS = 2
"""A rank is slow, or no longer slow, after so many periods."""


@dataclass
class _Judgement:
    """What is known of one rank."""

    is_slow: bool = False
    other_periods: int = 0
    """How many periods in a row have said otherwise."""
    since: str = ""
    """The beginning of the first of them."""


class SlowRanks:
    """Compares the ranks of a run, as one host's agent sees them; see Note [slow ranks].

    Args:
        pages: The descriptors of the status pages of this host's ranks, by rank; empty without a watchdog.
        mesh: The axes of the run's mesh. Ranks of one stage of a pipeline are compared with each other only.
        is_host_0: Whether this agent compares the ranks of all hosts.
        living: The ranks of all hosts that have started and have not ended.
    """

    def __init__(
        self, pages: Mapping[int, int], mesh: Sequence[PlannedAxis], *, is_host_0: bool, living: Iterable[int] = ()
    ) -> None:
        self._pages, self._mesh, self._is_host_0 = pages, mesh, is_host_0
        self._begins: dict[int, WorkerStatus] = {}
        self._living = set(living)
        self._measured: dict[int, StepTimes] = {}
        self._judgements: dict[int, _Judgement] = {}
        self._next_look_at = 0.0

    def receive(self, record: AnyRecord) -> None:
        """Take note of a rank's start and end, and of what any host has measured."""
        if isinstance(record, Started):
            self._living.add(record.rank)
        elif isinstance(record, Exited):
            self._living.discard(record.rank)
            self._measured.pop(record.rank, None)
        elif isinstance(record, StepTimes) and record.rank in self._living:
            self._measured[record.rank] = record

    def tick(self, now: float) -> list[AnyRecord]:
        """Measure the ranks of this host, and return the records to send."""
        if now < self._next_look_at:
            return []
        self._next_look_at = now + INTERVAL_SECONDS
        records: list[AnyRecord] = []
        for rank, page in self._pages.items():
            if rank in self._living:
                records += self._measure(rank, read_page(page))
        if self._is_host_0 and len(self._living) > 1 and self._measured.keys() >= self._living:
            records += self._compare()
            self._measured.clear()
        return records

    def _measure(self, rank: int, status: WorkerStatus) -> Iterator[StepTimes]:
        begin = self._begins.get(rank)
        if status.last is None or begin is None or begin.last is None:
            self._begins[rank] = status
            return
        steps, seconds = status.count - begin.count, status.last - begin.last
        if steps >= LEAST_STEPS and seconds >= PERIOD_SECONDS:
            self._begins[rank] = status
            yield StepTimes(
                rank=rank,
                time_ns=time.monotonic_ns(),
                step_seconds=seconds / steps,
                own_seconds=max(0.0, seconds - (status.collective_seconds - begin.collective_seconds)) / steps,
                period_seconds=seconds,
            )

    def _compare(self) -> Iterator[AnyRecord]:
        stages = {rank: find_stage(rank, self._mesh) for rank in self._living}
        for rank in sorted(self._living):
            others = [other for other in self._living if other != rank and stages[other] == stages[rank]]
            if others:
                usual = statistics.median(self._measured[other].own_seconds for other in others)
                yield from self._judge(rank, self._measured[rank], usual)

    def _judge(self, rank: int, measured: StepTimes, usual: float) -> Iterator[AnyRecord]:
        judgement, own = self._judgements.setdefault(rank, _Judgement()), measured.own_seconds
        is_slow = own >= SLOW_FACTOR * usual and own - usual >= LEAST_SHARE * measured.step_seconds
        if is_slow == judgement.is_slow:
            judgement.other_periods = 0
            return
        if not judgement.other_periods:
            begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=measured.period_seconds)
            judgement.since = begin.strftime("%H:%M:%S UTC")
        judgement.other_periods += 1
        if judgement.other_periods < PERIODS:
            return
        judgement.is_slow, judgement.other_periods = is_slow, 0
        slow = SlowRank(rank=rank, since=judgement.since, own_seconds=own, usual_seconds=usual)
        yield SlowRankChanged(rank=rank, time_ns=time.monotonic_ns(), slow=slow, is_over=not is_slow)
        text = slow.text if is_slow else f"rank {rank} is as fast as the others since {judgement.since}"
        yield Notice(rank=rank, time_ns=time.monotonic_ns(), text=text)


def find_stage(rank: int, mesh: Sequence[PlannedAxis]) -> int:
    """Return the stage of a rank along the axis `pipeline`; 0 without one.

    Args:
        rank: The rank with which the run began.
        mesh: The axes of the mesh, from the outermost.

    Example:
        >>> axes = [PlannedAxis(name=name, role=name, size=2) for name in ("pipeline", "data")]
        >>> [find_stage(rank, axes) for rank in range(4)]
        [0, 0, 1, 1]
    """
    for number, axis in enumerate(mesh):
        if axis.stage_workers:
            return next(stage for stage, ranks in enumerate(axis.stage_workers) if rank in ranks)
        if axis.role == "pipeline":
            return rank // prod(inner.size for inner in mesh[number + 1 :]) % axis.size
    return 0
