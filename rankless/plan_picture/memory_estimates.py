"""The memory of each worker: as measured on the first one, and as the plan says of the others."""

from collections.abc import Sequence
from dataclasses import dataclass

from rankless.plan_picture.holdings import HeldTensor, count_held
from rankless.plan_picture.worker_grid import WorkerGrid
from rankless.records.job_programs import JobMemory

SAME = 0.02
"""The part by which workers may differ that are shown as one."""


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """What some workers hold of a job.

    Attributes:
        workers (tuple[int, ...]): The workers, which hold about as much.
        sizes (dict[str, int]): The bytes of each kind, none for a kind that is not known.
        is_measured (bool): Whether one of them was measured. Else gradients and optimizer state are in proportion to
            what the first worker has of them.
    """

    workers: tuple[int, ...]
    sizes: dict[str, int]
    is_measured: bool

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return sum(self.sizes.values())


def estimate_memory(memory: JobMemory | None, tensors: Sequence[HeldTensor], grid: WorkerGrid) -> list[WorkerMemory]:
    """Return the memory of all workers, those that hold as much together. None without a measurement.

    Args:
        memory: What was measured on the first worker.
        tensors: The parameters of the job.
        grid: The workers.
    """
    if memory is None:
        return []
    held = list(
        zip(
            count_held(tensors, grid, "parameters"),
            count_held(tensors, grid, "gradients"),
            count_held(tensors, grid, "optimizer state"),
            strict=True,
        )
    )
    groups = group_workers(held, grid)
    measured = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer_state,
    }
    found = []
    for workers in groups:
        sizes = held[workers[0]]
        if workers[0] == 0:
            kinds = measured | {"activations": memory.activations or 0, "buffers": memory.buffers}
        else:
            parts = zip(measured.items(), sizes, held[0], strict=True)
            kinds = {kind: size * own // first for (kind, size), own, first in parts if first}
            kinds |= {"parameters": sizes[0], "buffers": memory.buffers}
        found.append(
            WorkerMemory(
                workers=tuple(workers),
                sizes={kind: size for kind, size in kinds.items() if size},
                is_measured=workers[0] == 0,
            )
        )
    return found


def group_workers(held: Sequence[tuple[int, ...]], grid: WorkerGrid) -> list[list[int]]:
    """Return the workers in groups that hold about as much. Stages of a pipeline have groups of their own, because
    their activations differ.

    Args:
        held: What each worker holds.
        grid: The workers.
    """
    pipelines = [axis.name for axis in grid.axes if axis.role == "pipeline"]
    groups: dict[tuple[int, ...], list[list[int]]] = {}
    for worker, sizes in enumerate(held):
        ranks = grid.find_ranks(worker)
        same_stage = groups.setdefault(tuple(ranks[axis] for axis in pipelines), [])
        for group in same_stage:
            pairs = zip(sizes, held[group[0]], strict=True)
            if all(abs(one - other) <= SAME * max(one, other) for one, other in pairs):
                group.append(worker)
                break
        else:
            same_stage.append([worker])
    return [group for same_stage in groups.values() for group in same_stage]
