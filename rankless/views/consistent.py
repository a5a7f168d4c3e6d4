"""The consistent view: a job on a mesh, captured once per kind of call, then run as one program on every rank."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rankless.program.capture import LEAF, Captured
from rankless.views.arguments import Arguments, piece_of, placement_of
from rankless.views.definition import JobDefinition
from rankless.views.equalising import equalise, require_same_kind_of_device
from rankless.views.preparing import Prepared, Programs
from rankless.views.world import World


class Consistent:
    """Runs one job on a mesh."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        self._programs = Programs(job, world)
        require_same_kind_of_device(job, world)
        equalise(job, world)

    def run(self, arguments: Arguments) -> Any:
        """The job's whole result, the same on every rank; a train job's step is made."""
        prepared = self._programs.program_for(arguments)
        mesh = self._world.mesh
        values = []
        for slot in prepared.slots:
            if isinstance(slot, int):
                tensor = arguments.tensors[slot]
                values.append(piece_of(tensor, placement_of(tensor, mesh), mesh))
            else:
                values.append(slot if isinstance(slot, Tensor) else slot.tensor())
        outputs = prepared.local([value.detach() for value in values])
        for module, training in prepared.captured.modes_set:
            module.training = training
        results = self._apply(prepared, outputs)
        if self._job.optimizer is not None:
            self._job.optimizer.step()
        return joined_result(prepared.captured, results)

    def _apply(self, prepared: Prepared, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Give gradients to parameters and new values to buffers; the rest are the job's results."""
        for parameter in prepared.parameters:
            parameter.grad = None
        results = []
        for value, described, target in zip(outputs, prepared.local.outputs, prepared.targets, strict=True):
            if target is None:
                results.append(value)
            elif described.kind == "gradient":
                target.tensor().grad = value
            else:
                with torch.no_grad():
                    target.tensor().copy_(value)
        # A train job's first result is what is minimised; the script gets its own results only.
        return results[1:] if self._job.trains else results


def joined_result(captured: Captured, results: Sequence[Tensor]) -> Any:
    """The job's result as the script returns it, with whole tensors."""
    remaining = iter(results)
    leaves = [next(remaining) if leaf is LEAF else leaf for leaf in captured.result_leaves]
    return pytree.tree_unflatten(leaves, captured.result_spec)
