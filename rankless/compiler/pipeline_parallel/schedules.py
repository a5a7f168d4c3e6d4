"""Schedules of a pipeline: in which order each worker computes its stages on the microbatches.

Note [schedules]: a worker has one or more stages, or some microbatches of one. Each stage has a
forward unit per microbatch, and in training a backward unit, which `zero-bubble` divides: gradients that an earlier
stage needs come first, gradients of parameters when there is nothing else to do. A simulation with unit costs makes the
orders. Each worker takes the first unit that is ready by the rules of the schedule, so every order can run, whatever
the number of microbatches.

- `gpipe`: all forward units, then all backward units (Huang et al., NeurIPS 2019). It holds all activations.
- `1f1b`: backward units as early as possible; worker w holds activations of at most P - w microbatches (Narayanan et
  al., SOSP 2019).
- `interleaved`: the same with several stages per worker, for shorter idle times (Narayanan et al., SC 2021).
- `zero-bubble`: as `1f1b`, with parameter gradients in the idle times: ZB-H1 of Qi et al., ICLR 2024.

Note [workers of stages]: in a pipeline along an axis of the mesh each stage belongs to one worker. Where some workers
are of another kind, such as CPU workers beside workers with accelerators, each stage belongs to all workers of a kind,
and they take its microbatches in turns: of four CPU workers each computes every fourth microbatch. So the numbers of
workers of the kinds are independent of each other. A unit runs on one worker alone, and values move from worker to
worker as in any pipeline. Only sums over microbatches have terms on several workers; see Note [sums of several
workers].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rankless.records.job_programs import PipelineUnit
from rankless.records.parallel_plan import PipelineSchedule

UnitKind = Literal["forward", "backward", "weights"]
"""What a unit computes; "weights" are the gradients of parameters that no other stage needs."""
UNIT_KINDS: tuple[UnitKind, ...] = get_args(UnitKind)
INTERLEAVED_STAGES = 2
"""Stages per worker of an interleaved schedule."""


@dataclass(frozen=True)
class StageWorkers:
    """The workers of each stage; see Note [workers of stages].

    Attributes:
        of (tuple[tuple[int, ...], ...]): For each stage its workers, by their ranks along the axis `pipeline`.
    """

    of: tuple[tuple[int, ...], ...]

    @staticmethod
    def alternate(*, stages: int, workers: int) -> "StageWorkers":
        """Return one worker per stage: stage s belongs to worker s % workers."""
        return StageWorkers(tuple((stage % workers,) for stage in range(stages)))

    def find_worker(self, stage: int, microbatch: int) -> int:
        """Return the worker that computes a stage for a microbatch."""
        workers = self.of[stage]
        return workers[microbatch % len(workers)]

    def find_first(self, stage: int) -> int:
        """Return the worker that computes what a stage has once, for all microbatches."""
        return self.of[stage][0]

    def list_stages(self, worker: int) -> list[int]:
        """Return the stages of which a worker computes units."""
        return [stage for stage, workers in enumerate(self.of) if worker in workers]

    def list_busy(self, stage: int, microbatches: int) -> list[int]:
        """Return the workers of a stage that compute it for some microbatch: with few of them, not all do."""
        return list(self.of[stage][:microbatches])

    def count_ahead(self, stage: int) -> int:
        """Return how many microbatches a worker of a stage may have begun, so that all later workers can be busy."""
        later = sum(len(workers) for workers in self.of[stage:])
        return -(-later // len(self.of[stage]))


@dataclass(frozen=True)
class Unit:
    """What a worker computes without interruption: one stage on one microbatch."""

    kind: UnitKind
    stage: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The units of every worker in order.

    Attributes:
        makespan (int): The time of a simulated step, where a forward unit takes 1 and a backward unit 2.
        busy (tuple[int, ...]): How long each worker computes in it.
        spans (tuple[tuple[tuple[int, int], ...], ...]): For each worker when its units begin and end in it.
    """

    name: PipelineSchedule
    workers: tuple[tuple[Unit, ...], ...]
    makespan: int
    busy: tuple[int, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def idle_fraction(self) -> float:
        """The part of the simulated time in which workers wait, on average: the bubble."""
        return 1 - sum(self.busy) / (self.makespan * len(self.busy))

    def count_held(self, worker: int) -> int:
        """Return the most forward units whose results a worker holds at once for their backward units."""
        if not any(unit.kind == "backward" for unit in self.workers[worker]):
            return 0
        held = most = 0
        last = "weights" if any(unit.kind == "weights" for unit in self.workers[worker]) else "backward"
        for unit in self.workers[worker]:
            held += (unit.kind == "forward") - (unit.kind == last)
            most = max(most, held)
        return most


def make_schedule(
    name: PipelineSchedule, *, workers: int, stage_workers: StageWorkers, microbatches: int, trains: bool
) -> Schedule:
    """Return the order of units of each worker; see Note [schedules].

    Args:
        trains: Whether there are backward units.
    """
    return _Simulation(name, workers, stage_workers, microbatches, trains).run()


def describe_timeline(schedule: Schedule) -> tuple[tuple[PipelineUnit, ...], ...]:
    """Return the simulated step of a schedule as plain data."""
    return tuple(
        tuple(
            PipelineUnit(kind=unit.kind, stage=unit.stage, microbatch=unit.microbatch, begin=begin, end=end)
            for unit, (begin, end) in zip(units, spans, strict=True)
        )
        for units, spans in zip(schedule.workers, schedule.spans, strict=True)
    )


class _Simulation:
    def __init__(
        self, name: PipelineSchedule, workers: int, stage_workers: StageWorkers, microbatches: int, trains: bool
    ) -> None:
        self._name = name
        self._workers = workers
        self._stage_workers = stage_workers
        self._stages = len(stage_workers.of)
        self._microbatches = microbatches
        kinds: tuple[UnitKind, ...] = ("forward",)
        if trains:
            kinds = ("forward", "backward", "weights") if name == "zero-bubble" else ("forward", "backward")
        self._kinds = kinds
        self._costs: Mapping[UnitKind, int] = {"forward": 1, "backward": 1 if "weights" in kinds else 2, "weights": 1}
        self._ends: dict[Unit, int] = {}
        self._waiting = [
            [
                Unit(kind, stage, microbatch)
                for kind in kinds
                for stage in stage_workers.list_stages(worker)
                for microbatch in range(microbatches)
                if stage_workers.find_worker(stage, microbatch) == worker
            ]
            for worker in range(workers)
        ]

    def run(self) -> Schedule:
        """Let time pass until all units are done."""
        done: list[list[Unit]] = [[] for _ in range(self._workers)]
        free_from = [0] * self._workers
        time = 0
        while any(self._waiting):
            for worker, waiting in enumerate(self._waiting):
                if not waiting or free_from[worker] > time:
                    continue
                unit = self._choose(worker, done[worker], time)
                if unit is not None:
                    waiting.remove(unit)
                    done[worker].append(unit)
                    free_from[worker] = self._ends[unit] = time + self._costs[unit.kind]
            later = [end for end in free_from if end > time]
            assert later or not any(self._waiting), "no worker can continue"
            time = min(later, default=time)
        busy = tuple(sum(self._costs[unit.kind] for unit in units) for units in done)
        spans = tuple(
            tuple((self._ends[unit] - self._costs[unit.kind], self._ends[unit]) for unit in units) for units in done
        )
        return Schedule(
            name=self._name,
            workers=tuple(map(tuple, done)),
            makespan=max(free_from),
            busy=busy,
            spans=spans,
        )

    def _choose(self, worker: int, done: Sequence[Unit], time: int) -> Unit | None:
        """Return the unit that a free worker takes now; None if it waits."""
        ready = [unit for unit in self._waiting[worker] if self._is_ready(unit, time)]
        by_kind = {kind: [unit for unit in ready if unit.kind == kind] for kind in self._kinds}
        # As many microbatches as there are workers go through all own stages, backward from the last one.
        if by_kind["forward"] and self._may_go_forward(worker, done):
            return min(
                by_kind["forward"], key=lambda unit: (unit.microbatch // self._workers, unit.stage, unit.microbatch)
            )
        if by_kind.get("backward"):
            return min(
                by_kind["backward"], key=lambda unit: (unit.microbatch // self._workers, -unit.stage, unit.microbatch)
            )
        weights = by_kind.get("weights")
        return weights[0] if weights else None

    def _may_go_forward(self, worker: int, done: Sequence[Unit]) -> bool:
        """Return whether a worker may hold the results of one more forward unit."""
        if self._name == "gpipe" or "backward" not in self._kinds:
            return True
        count = {kind: sum(unit.kind == kind for unit in done) for kind in self._kinds}
        own = self._stage_workers.list_stages(worker)
        if len(own) == 1:
            limit = self._stage_workers.count_ahead(own[0])
        else:
            # So many units run before the first backward unit in Narayanan et al., SC 2021.
            limit = 2 * (self._workers - worker - 1) + (len(own) - 1) * self._workers + 1
        # ZB-H1 holds no more activations than 1f1b does: gradients of parameters wait only as long as that is so.
        is_held = "weights" in count and count["forward"] - count["weights"] >= self._workers
        return count["forward"] - count["backward"] < limit and not is_held

    def _is_ready(self, unit: Unit, time: int) -> bool:
        """Return whether what a unit needs is there."""
        kind, stage, microbatch = unit.kind, unit.stage, unit.microbatch
        if kind == "forward":
            needed = [] if stage == 0 else [Unit("forward", stage - 1, microbatch)]
        elif kind == "backward":
            needed = [Unit("forward", stage, microbatch)]
            if stage + 1 < self._stages:
                needed.append(Unit("backward", stage + 1, microbatch))
            if self._name == "gpipe":  # no backward unit before all forward units of its worker
                worker = self._stage_workers.find_worker(stage, microbatch)
                needed += [
                    Unit("forward", other, number)
                    for other in self._stage_workers.list_stages(worker)
                    for number in range(self._microbatches)
                    if self._stage_workers.find_worker(other, number) == worker
                ]
        else:
            needed = [Unit("backward", stage, microbatch)]
        return all(self._ends.get(item, time + 1) <= time for item in needed)
