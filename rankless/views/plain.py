"""A job on one device: exactly what the plain script would do."""

import contextlib
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rankless.program.autocast import fresh_casts, without_autocast
from rankless.program.capture import objective
from rankless.views.arguments import Arguments
from rankless.views.counting import Counting
from rankless.views.definition import JobDefinition, Outcome, without_gradient
from rankless.views.inspecting import record_plain, run_beside
from rankless.views.recording import disturb, nudged
from rankless.views.world import World


class Plain:
    """Runs a job eagerly. In `verify`'s noise-floor run parameters and gradients are disturbed in their last bits."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        self._device = job.device(world.mesh.device)
        self._counting = Counting(job, world, alone=True) if job.gathers else None
        seed = world.perturbation_seed
        self._noise = None if seed is None else torch.Generator().manual_seed(seed)

    def run(self, arguments: Arguments) -> Outcome:
        """The job's result; a train job's gradients are made."""
        args, kwargs = arguments.joined(arguments.tensors)
        looked_at = self._world.values is not None and self._world.values.begins(self._job.name)
        if not self._job.trains:
            if looked_at:
                run_beside(self._job, self._world, arguments)
            with fresh_casts(), torch.no_grad():
                result: Any = self._job.function(*args, **kwargs)
            if looked_at:
                record_plain(self._job, self._world, result)
            return Outcome(pytree.tree_map(without_gradient, result))
        # Before the job, which may change the buffers that its counts are made of.
        counts = () if self._counting is None else self._counting.of_call(arguments)
        parameters = self._job.parameters()
        for parameter in parameters:
            parameter.grad = None
        with contextlib.ExitStack() as stack:
            if self._noise is not None:
                stack.enter_context(nudged(parameters, self._noise))
            if looked_at:
                run_beside(self._job, self._world, arguments)
            with fresh_casts():
                result = self._job.function(*args, **kwargs)
                loss = objective(result, self._job.name)
                with without_autocast(self._device.type):
                    loss.backward()
        if looked_at:
            record_plain(self._job, self._world, result)
        if self._noise is not None:
            disturb([item.grad for item in parameters if item.grad is not None], self._noise)
        return Outcome(pytree.tree_map(without_gradient, result), loss=loss.detach(), counts=counts)
