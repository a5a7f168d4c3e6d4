"""Which workers compute the stages of a pipeline.

Note [workers of stages]: in a pipeline along an axis of the mesh each stage belongs to one worker. Where some workers
are of another kind, such as CPU workers beside workers with accelerators, each stage belongs to all workers of a kind,
and they take its microbatches in turns: of four CPU workers each computes every fourth microbatch. So the numbers of
workers of the kinds are independent of each other. A unit runs on one worker alone, and values move from worker to
worker as in any pipeline. Only sums over microbatches have terms on several workers; see Note [sums of several
workers].
"""

from dataclasses import dataclass


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
