"""The workers of a pipeline that compute the stages of jobs, and those that have its parameters."""

import math
from collections.abc import Mapping, MutableMapping, Sequence

from torch import Tensor

from rankless.compiler.pipeline_parallel.schedules import StageWorkers
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.plan import MICROBATCHES_PER_WORKER, Plan

MOST_TURNS = 4
"""So many times as many microbatches as workers of a kind a batch has by default, at most."""


def find_stage_workers(axis: MeshAxis, stages: int) -> StageWorkers:
    """Return the workers of each stage.

    Args:
        axis: The axis `pipeline`.
        stages: The number of stages. Where workers are heterogeneous it is the number of their kinds.
    """
    if axis.stage_workers:
        return StageWorkers(axis.stage_workers)
    return StageWorkers.alternate(stages=stages, workers=axis.size)


def count_microbatches(plan: Plan, axis: MeshAxis) -> int:
    """Return the number of microbatches of a batch with enough samples.

    Heterogeneous workers have by default two each, and all workers of a kind have as many, if that takes not too many.

    Args:
        plan: The plan of a job.
        axis: The axis `pipeline`.
    """
    if not axis.stage_workers or plan.microbatches is not None:
        return plan.count_microbatches(axis.size)
    sizes = [len(workers) for workers in axis.stage_workers]
    wanted, common = MICROBATCHES_PER_WORKER * max(sizes), math.lcm(*sizes)
    return wanted if common > MOST_TURNS * max(sizes) else -(-wanted // common) * common


def choose_owner(tensor: Tensor, stage: int, axis: MeshAxis, owners: MutableMapping[Tensor, int]) -> int:
    """Return the worker that has a parameter: of the workers of its stage the one with the fewest bytes.

    Args:
        tensor: The parameter.
        stage: Its stage.
        axis: The axis `pipeline`.
        owners: The workers of parameters, which gets this one's.
    """
    if tensor not in owners:
        loads = count_loads(owners)
        workers = axis.stage_workers[stage] if axis.stage_workers else (stage % axis.size,)
        owners[tensor] = min(workers, key=lambda worker: loads.get(worker, 0))
    return owners[tensor]


def choose_copies(owner: int, workers: Sequence[int]) -> tuple[int, ...]:
    """Return the workers with copies of what one worker has, so that it may be lost: the next one of its kind, if any.

    Args:
        owner: The worker that has it.
        workers: The workers of its kind.
    """
    after = workers[(workers.index(owner) + 1) % len(workers)]
    return () if after == owner else (after,)


def count_loads(owners: Mapping[Tensor, int]) -> dict[int, int]:
    """Return the bytes of the parameters of each worker."""
    loads: dict[int, int] = {}
    for tensor, worker in owners.items():
        loads[worker] = loads.get(worker, 0) + tensor.numel() * tensor.element_size()
    return loads
