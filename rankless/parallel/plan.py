"""The plan that a script gives to a job: how its model is divided along the axes of the mesh."""

from dataclasses import dataclass
from typing import get_args

from rankless.errors import ConfigError
from rankless.records.parallel_plan import PipelineSchedule

MICROBATCHES_PER_WORKER = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a job is divided between workers, where the default is not wanted.

    A plan only says who computes and in which order. What a job computes is the same under every plan.

    Args:
        schedule: The order of work along the axis `pipeline`: "gpipe" does all forward passes first, and holds the
            activations of all microbatches. "1f1b" holds those of at most as many microbatches as there are stages.
            "interleaved" gives two stages to each worker, and waits less. "zero-bubble" computes gradients of
            parameters while it would wait. Default: "1f1b".
        microbatches: The parts into which the axis `pipeline` divides a batch. A batch with fewer samples has fewer.
            Default: two for each worker along the axis.
        stages: The modules at which the stages after the first begin, by their names in the job, such as
            `("model.layers.4", "model.layers.8")`. Default: Rankless chooses them for about equal work.

    Raises:
        ConfigError: A value is invalid.

    Example:
        >>> rankless.Plan(schedule="gpipe", microbatches=8).microbatches
        8
    """

    schedule: PipelineSchedule = "1f1b"
    microbatches: int | None = None
    stages: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.schedule not in get_args(PipelineSchedule):
            raise ConfigError(
                expected=f"schedule= as one of {', '.join(map(repr, get_args(PipelineSchedule)))}",
                found=f"schedule={self.schedule!r}",
                fix='omit it for "1f1b"',
            )
        count = self.microbatches
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(
                expected="microbatches= as a number from 1 up",
                found=f"microbatches={count!r}",
                fix="omit it for two microbatches for each worker along the axis pipeline",
            )
        stages = self.stages
        is_list = isinstance(stages, list | tuple) and all(isinstance(name, str) for name in stages)
        if stages is not None and not is_list:
            raise ConfigError(
                expected="stages= as the names of modules, such as ('model.layers.4',)",
                found=f"stages={stages!r}",
                fix="omit it, and Rankless chooses the stages",
            )
        if stages is not None:
            object.__setattr__(self, "stages", tuple(stages))

    def count_microbatches(self, workers: int) -> int:
        """Return the number of microbatches of a batch with enough samples.

        Args:
            workers: The number of workers along the axis `pipeline`.
        """
        return self.microbatches or MICROBATCHES_PER_WORKER * workers
