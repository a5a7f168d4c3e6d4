"""The plain view: run a job on one device exactly as the plain script would.

`rankless.jobs.views.uncaptured` runs it on every rank too.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rankless.compiler.capture.capture import extract_loss, run_compiled_functions_eagerly
from rankless.compiler.capture.global_modes import clear_autocast_cache, disable_autocast
from rankless.compiler.capture.refused_training_calls import refuse_training_calls, warn_of_refused_changes
from rankless.compiler.capture.result_structure import map_result
from rankless.compiler.capture.trace_errors import find_compressed_tensor
from rankless.compiler.ir.counter_operators import CounterRandomMode
from rankless.compiler.tracing.refused_tensor_functions import ModuleTensors
from rankless.context.world import World
from rankless.errors import CaptureError
from rankless.jobs.arguments import FlattenedArguments, find_refused_argument
from rankless.jobs.job_definition import CallResult, JobDefinition, detach_leaf
from rankless.jobs.last_bit_perturbation import perturb_gradients, perturbed_parameters
from rankless.jobs.loss_weight_programs import LossWeightReader


class PlainView:
    """Runs a job eagerly. In the noise-floor run of `verify` it perturbs parameters and gradients."""

    def __init__(self, job: JobDefinition, world: World, *, warns: bool = True) -> None:
        self._job = job
        self._world = world
        self._device = job.device(world.mesh.device)
        self._joint = world.joint.join_job(job, world)
        self._loss_weights = LossWeightReader(job, world, weights_only=True) if job.accumulates else None
        seed = world.settings.perturbation_seed
        self._is_first = True
        self._warns = warns and job.captured
        """Whether it warns of what no program can do."""
        self._noise = None if seed is None else torch.Generator().manual_seed(seed)

    def run(self, arguments: FlattenedArguments) -> CallResult:
        """Return the job's result. A train job also sets its parameters' gradients."""
        self._joint.begin_call()
        self._joint.count_call()
        args, kwargs = arguments.unflatten(arguments.tensors)
        inspector = self._world.settings.inspector
        if inspector is not None and not inspector.count_call(self._job.name):
            inspector = None
        is_checked = self._is_first and self._warns
        refused = find_refused_argument(self._job.function, arguments, trains=self._job.trains) if is_checked else None
        if refused is None and is_checked:
            refused = find_compressed_tensor(self._job.function, self._job.modules)
        if refused is not None:
            self._warn(refused, "")
        if not self._job.trains:
            if inspector is not None and self._job.captured:
                inspector.run_alongside(self._job, self._world, arguments)
            with self._observe_first_call(), clear_autocast_cache(), self._draw(), torch.no_grad():
                result: Any = self._job.function(*args, **kwargs)
            if inspector is not None:
                inspector.record_plain(self._job, result)
            return CallResult(map_result(detach_leaf, result))
        # Before the job, because the job may change buffers that its loss weights depend on.
        weights = () if self._loss_weights is None else self._loss_weights.read_call(arguments)
        parameters = self._job.parameters()
        for parameter in parameters:
            parameter.grad = None
        with contextlib.ExitStack() as stack:
            if self._noise is not None:
                stack.enter_context(perturbed_parameters(parameters, self._noise))
            if inspector is not None and self._job.captured:
                inspector.run_alongside(self._job, self._world, arguments)
            with clear_autocast_cache(), self._draw():
                with self._observe_first_call():
                    result = self._job.function(*args, **kwargs)
                loss = extract_loss(result, self._job.name)
                with disable_autocast(self._device.type):
                    loss.backward()
        if inspector is not None:
            inspector.record_plain(self._job, result)
        if self._noise is not None:
            perturb_gradients([item.grad for item in parameters if item.grad is not None], self._noise)
        return CallResult(map_result(detach_leaf, result), loss=loss.detach(), weights=weights, parameters=parameters)

    @contextlib.contextmanager
    def _observe_first_call(self) -> Iterator[None]:
        """At the first call, refuse what a job may not do, and warn of what it may not do on several workers."""
        if not self._is_first:
            yield
            return
        self._is_first = False
        if not self._warns:
            with refuse_training_calls():
                yield
            return
        tensors = dict[str, Tensor]()
        for name, module in self._job.modules.items():
            tensors |= {f"parameter {path!r}": item for path, item in module.named_parameters(prefix=name)}
            tensors |= {f"buffer {path!r}": item for path, item in module.named_buffers(prefix=name)}
        with refuse_training_calls(), warn_of_refused_changes(ModuleTensors(tensors), warn=self._warn):
            yield

    @contextlib.contextmanager
    def _draw(self) -> Iterator[None]:
        """Within the context, random operators draw by counter if the job says so, as on several workers."""
        if not self._job.draws_by_counter:
            yield
            return
        with run_compiled_functions_eagerly(), CounterRandomMode():
            yield

    def _warn(self, refusal: CaptureError, line: str) -> None:
        """Warn of what a capture refuses."""
        self._world.notify(
            f"{line or self._job.line}: job {self._job.name!r}: {refusal.found}; several workers cannot run this as "
            "one program: along the axis data its functions run one by one, which is slower, and other axes refuse it. "
            f"To keep it one program, {refusal.fix}"
        )
