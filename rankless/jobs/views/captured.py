"""The consistent view: capture a job once per kind of call, then run it as one program on every rank of a mesh."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rankless.compiler.capture.capture import TENSOR_LEAF, CapturedJob
from rankless.compiler.capture.global_modes import clear_autocast_cache
from rankless.compiler.capture.result_structure import LiveResult
from rankless.compiler.tracing.symbolic_sizes import evaluate_size
from rankless.context.world import World
from rankless.data.tensors_on_cpu_ranks import ReaderTensor
from rankless.deferred_models.build_and_materialize import find_deferred, materialize_tensors
from rankless.deferred_models.deferred_tensor import DeferredTensor
from rankless.jobs.arguments import (
    FlattenedArguments,
    find_refused_argument,
    get_shardings,
)
from rankless.jobs.call_agreement import CallSync, RandomStates, format_call
from rankless.jobs.job_definition import CallResult, JobDefinition
from rankless.jobs.loss_weight_programs import LossWeightReader
from rankless.jobs.model_sync_between_ranks import require_usable_models, sync_models, sync_tensors
from rankless.jobs.programs.bound_program import BoundProgram, ModuleTensorReferences, collect_inputs, find_slot
from rankless.jobs.programs.program_cache import CacheLookup, ProgramCache, ProgramRun
from rankless.jobs.programs.tensor_and_expert_divisions import find_layer_divisions
from rankless.jobs.state_division import PlannedDivision, apply_plan


class ConsistentView:
    """Runs one job on a mesh."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job = apply_plan(job, world)
        self._world = world
        self._loss_weights = LossWeightReader(job, world, weights_only=False) if job.accumulates else None
        self._programs = ProgramCache(job, world) if self._loss_weights is None else self._loss_weights.programs
        self._sync = CallSync(job, world)
        self.joint = world.joint.join_job(job, world)
        self.division = PlannedDivision(job, world)
        self._draws = False
        self._generators: list[torch.Generator] = []
        """Generators of the script from which the job has drawn."""
        require_usable_models(job, world)

    def take_over(self, before: "ConsistentView") -> None:
        """Capture nothing, and compare no models, that the view of more workers has captured and compared."""
        self._programs.take_captures(before._programs)
        if not before._world.numbering.has_copies:  # each worker has all states, and has them still
            self._sync.take_over(before._sync)

    def divide_states(self) -> None:
        """Divide the job's states before its first call, unless that has been done. Collective."""
        if self.division.is_up_to_date:
            return
        self._world.mesh.check_sync_point(f"the division of the states of job {self._job.name!r}")
        self._world.owner.begin_call()
        if find_deferred(self._job.modules.values()):
            self.division.update(self._complete)
        else:
            sync_models(self._job, self._world, when="before its states were divided")
            self.division.update()

    def _complete(self, name: str, tensor: Tensor) -> None:
        """Compute the value of a tensor that is about to be divided, if it is deferred."""
        if isinstance(tensor, DeferredTensor):
            materialize_tensors([tensor])
            sync_tensors([(name, tensor)], self._job, self._world, when="before its states were divided")

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators of the script from which the job has drawn."""
        return self._generators

    def run(self, arguments: FlattenedArguments) -> CallResult:
        """Return the job's whole result, the same on every rank. A train job also sets its parameters' gradients."""
        return self.compute(arguments)()

    def compute(self, arguments: FlattenedArguments) -> Callable[[], CallResult]:
        """Run the call's program. Nothing but random generators changes until the returned function is called.

        Returns:
            A function that sets gradients, and whatever else the program changes, and returns the result.
        """
        with self._sync.counting():
            return self._compute(arguments)

    def _compute(self, arguments: FlattenedArguments) -> Callable[[], CallResult]:
        refused = find_refused_argument(self._job.function, arguments, trains=self._job.trains)
        if refused is not None:
            raise refused.add_location(self._job.line)
        arguments = self.division.divide_arguments(arguments)
        shardings = get_shardings(arguments, self._world.mesh)
        call = self._programs.look_up(arguments, shardings)
        self._sync_call(call)
        self._programs.begin_call(self._sync.calls)
        self._world.owner.begin_call()
        self.joint.begin_call()
        self.joint.begin_program()  # before a capture
        self._decide_division(call)
        if self.division.update():
            call = self._programs.look_up(arguments, shardings)
        if call.known is None:
            self.division.note_arguments(arguments, shardings)
        inspector = self._world.settings.inspector
        inspected = inspector is not None and inspector.count_call(self._job.name)
        with clear_autocast_cache():
            if inspected:
                call = replace(call, known=self._programs.capture_exactly(call))
            ran = self._programs.run_checked(
                call, lambda program: self._run_program(program, call, inspected=inspected)
            )
        if self._job.trains:
            self._world.mesh.check_sync_point_again()  # the other hosts have arrived, and no step is made yet
        self.joint.end_program(ran.bound, call)
        take_copies = self._world.owner.copy_gradients(*ran.bound.targets.list_gradients(ran.outputs))
        return functools.partial(self._apply, ran, arguments, take_copies)

    def _apply(self, ran: ProgramRun, arguments: FlattenedArguments, take_copies: Callable[[], None]) -> CallResult:
        """Set what a program has computed, and return the call's result."""
        self.joint.count_call()
        take_copies()
        bound, outputs = ran.bound, ran.outputs
        states = bound.sources.states.read()
        sizes = bound.sizes(arguments)
        self._draws = self._draws or bound.captured.program.is_random
        self._generators = list(dict.fromkeys([*self._generators, *bound.captured.program.generators]))
        for module, training in bound.captured.changed_modes:
            module.training = training
        results, changed = bound.targets.apply(outputs)
        for weight in bound.recomputed_weights:
            weight.refresh()
        self._sync.record_states(states, changed)
        if not self._job.trains:
            return CallResult(build_result(self._job, bound.captured, results, sizes))
        self.joint.end_call()
        # Order of the outputs: the minimized loss, the script's own results, the loss weights.
        loss, *results = results
        weights = () if self._loss_weights is None else self._loss_weights.read(bound, results)
        return CallResult(
            build_result(self._job, bound.captured, results, sizes),
            loss=loss,
            weights=weights,
            parameters=bound.parameters,
        )

    def _decide_division(self, call: CacheLookup) -> None:
        """Decide at the first call of a train job how its program divides its parameters. Collective."""
        if not self.division.needs_program:
            return
        program = self._programs.capture_before_division(call)
        if self.division.layer_axes:
            divisions = find_layer_divisions(program, self._job, self._world, self.division.layer_axes)
            self.division.take_divisions(divisions)
        if self.division.pipeline is not None:
            self.division.take_stages(self._programs.pipelines.find_stages(program).owners)

    def _run_program(self, bound: BoundProgram, call: CacheLookup, *, inspected: bool) -> Sequence[Tensor]:
        """Run a program on this call's values and return its outputs."""
        program: Any = bound.local
        if inspected and self._world.settings.inspector is not None:
            for tensor in call.arguments.tensors:
                if isinstance(tensor, ReaderTensor):
                    tensor.whole()  # because the program records values of all workers
            program = self._world.settings.inspector.instrument(bound.local, self._world)
        for parameter in (*bound.parameters, *self._world.owner.get_holders(bound.parameters)):
            parameter.grad = None  # before the program, which uses the memory of gradients again that nobody holds
        self.joint.begin_program()
        values = collect_inputs(bound, call.arguments, call.shardings, self._world.mesh)
        sizes = list(bound.sizes(call.arguments).values())
        if self._world.settings.programs is not None and not inspected:
            return self._world.settings.programs.run(self._job, bound, values, sizes)
        outputs: Sequence[Tensor] = program(values, sizes)
        return outputs

    def _sync_call(self, call: CacheLookup) -> None:
        """Check that all ranks make this call, with the same inputs, models and program. Raises `RanksDiverged`."""
        stale_guard = call.stale_guard() if call.known is None else None
        self._sync.check(
            format_call(self._job.name, self._sync.calls + 1, call.arguments),
            arguments=call.arguments,
            program=0 if call.known is None else call.known.number,
            random_states=RandomStates(self._generators) if self._draws else None,
            remark="" if stale_guard is None else f"{stale_guard.label} {stale_guard.describe_change()}",
        )


def build_result(job: JobDefinition, captured: CapturedJob, results: Sequence[Tensor], sizes: Mapping[str, int]) -> Any:
    """Return the job's result as the script returns it, with whole tensors and with sizes as numbers."""
    remaining = iter(results)
    leaves: list[Any] = []
    for leaf in captured.result_leaves:
        if isinstance(leaf, LiveResult):
            (state,) = ModuleTensorReferences([find_slot(job, leaf.name)]).read()
            leaves.append(leaf.read(state, next(remaining), functools.partial(evaluate_size, symbols=sizes)))
        else:
            leaves.append(next(remaining) if leaf is TENSOR_LEAF else evaluate_size(leaf, sizes))
    return captured.result_structure.build(leaves)
