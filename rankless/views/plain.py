"""A job on one device: exactly what the plain script would do."""

import contextlib
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rankless.program.capture import objective
from rankless.views.arguments import Arguments
from rankless.views.definition import JobDefinition, without_gradient
from rankless.views.inspecting import record_plain, run_beside
from rankless.views.recording import disturb, nudged
from rankless.views.world import World


class Plain:
    """Runs a job eagerly. In `verify`'s noise-floor run parameters and gradients are disturbed in their last bits."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        seed = world.perturbation_seed
        self._noise = None if seed is None else torch.Generator().manual_seed(seed)

    def run(self, arguments: Arguments) -> Any:
        """The job's result; a train job's step is made."""
        args, kwargs = arguments.joined(arguments.tensors)
        looked_at = self._world.values is not None and self._world.values.begins(self._job.name)
        if not self._job.trains:
            if looked_at:
                run_beside(self._job, self._world, arguments)
            with torch.no_grad():
                result = self._job.function(*args, **kwargs)
            if looked_at:
                record_plain(self._job, self._world, result)
            return pytree.tree_map(without_gradient, result)
        parameters = self._job.parameters()
        for parameter in parameters:
            parameter.grad = None
        with contextlib.ExitStack() as stack:
            if self._noise is not None:
                stack.enter_context(nudged(parameters, self._noise))
            if looked_at:
                run_beside(self._job, self._world, arguments)
            result = self._job.function(*args, **kwargs)
            objective(result, self._job.name).backward()
        if looked_at:
            record_plain(self._job, self._world, result)
        if self._noise is not None:
            disturb([item.grad for item in parameters if item.grad is not None], self._noise)
        assert self._job.optimizer is not None
        self._job.optimizer.step()
        return pytree.tree_map(without_gradient, result)
