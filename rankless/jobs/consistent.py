"""The consistent view: a job on a mesh, captured once per kind of call, then run as one program on every rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rankless.compiler.capture.autocast import clear_autocast_cache
from rankless.compiler.capture.capture import TENSOR_LEAF, CapturedJob
from rankless.compiler.tracing.symbolic_sizes import evaluate_size
from rankless.context.world import World
from rankless.jobs.arguments import Arguments, piece_of, placements_of
from rankless.jobs.call_fingerprint import GENERATOR, call_text, digests_of, generator_digest, names_of
from rankless.jobs.definition import JobDefinition, Outcome
from rankless.jobs.executable import Executable
from rankless.jobs.loss_weights import LossWeights
from rankless.jobs.model_sync import equalise, require_equal, require_same_kind_of_device
from rankless.jobs.program_cache import Call, ProgramCache

CHANGED = ", its models changed outside jobs since"
READ = "Python values that the job reads"


class Consistent:
    """Runs one job on a mesh."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        self._counting = LossWeights(job, world, alone=False) if job.gathers else None
        self._programs = ProgramCache(job, world) if self._counting is None else self._counting.programs
        self._calls = 0
        self._changes = 0
        self._draws = False
        self._tensors: Sequence[Tensor] = ()
        require_same_kind_of_device(job, world)

    def run(self, arguments: Arguments) -> Outcome:
        """The job's whole result, the same on every rank; a train job's gradients are made."""
        placements = placements_of(arguments, self._world.mesh)
        call = self._programs.look_up(arguments, placements)
        self._meet(call)
        inspector = self._world.inspector
        inspected = inspector is not None and inspector.begins(self._job.name)
        with clear_autocast_cache():
            if inspected:
                prepared = self._programs.captured_exactly(call)
            else:
                prepared = call.known or self._programs.captured(call)
        self._draws = self._draws or prepared.captured.program.draws
        mesh = self._world.mesh
        values, states = [], []
        for slot in prepared.slots:
            if isinstance(slot, int):
                tensor = arguments.tensors[slot]
                values.append(piece_of(tensor, placements[slot], mesh))
            elif isinstance(slot, Tensor):
                values.append(slot)
            else:
                values.append(state := slot.tensor())
                states.append(state)
        sizes = prepared.sizes(arguments)
        program: Any = prepared.local
        if inspected and inspector is not None:
            program = inspector.instrument(prepared.local.sharded, self._world)
        outputs = program([value.detach() for value in values], list(sizes.values()))
        for module, training in prepared.captured.changed_modes:
            module.training = training
        results = self._apply(prepared, outputs)
        self._tensors = states
        self._world.watch.note(states)
        if not self._job.trains:
            return Outcome(joined_result(prepared.captured, results, sizes))
        # First what is minimised, then the script's own results, last what the loss was divided by.
        loss, *results = results
        counts = () if self._counting is None else self._counting.read(prepared, results)
        return Outcome(joined_result(prepared.captured, results, sizes), loss=loss, counts=counts)

    def _meet(self, call: Call) -> None:
        """Make sure that all ranks make this call, with the same inputs and models; raises `RanksDiverged`.

        Also with the same program: where a Python value that the job reads differs, one rank would capture alone.
        """
        self._calls += 1
        job, mesh = self._job, self._world.mesh
        is_first = self._calls == 1
        changed = not is_first and self._world.watch.changed(self._tensors)
        if mesh.desync_detector is not None:
            arguments = call.arguments
            program = 0 if call.known is None else call.known.number
            drawn = [generator_digest()] if self._draws else []
            stale = call.stale() if call.known is None else None
            mesh.check_sync_point(
                call_text(job.name, self._calls, arguments) + (CHANGED if changed else ""),
                names=lambda: [READ, *([GENERATOR] if drawn else []), *names_of(job.function, arguments)],
                digests=[program, *drawn, *digests_of(arguments.tensors)],
                remark="" if stale is None else f"{stale.label} {stale.describe_change()}",
            )
        self._changes += changed
        if is_first:
            equalise(job, self._world, when="at the first call")
        elif changed and is_power_of_two(self._changes):
            # A script that changes its models after every step, as by clipping weights, is not slowed down for ever.
            equalise(job, self._world, when=f"at call {self._calls}, changed outside jobs")
        if job.check_synchronized_every is not None and self._calls % job.check_synchronized_every == 0:
            require_equal(job, self._world, call=self._calls)

    def _apply(self, prepared: Executable, outputs: Sequence[Tensor]) -> list[Tensor]:
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
        return results


def joined_result(captured: CapturedJob, results: Sequence[Tensor], sizes: Mapping[str, int]) -> Any:
    """The job's result as the script returns it, with whole tensors, and sizes as the numbers they are now."""
    remaining = iter(results)
    leaves = [next(remaining) if leaf is TENSOR_LEAF else evaluate_size(leaf, sizes) for leaf in captured.result_leaves]
    return pytree.tree_unflatten(leaves, captured.result_spec)


def is_power_of_two(number: int) -> bool:
    """Whether a positive number is 1, 2, 4, 8, …"""
    return number & (number - 1) == 0
