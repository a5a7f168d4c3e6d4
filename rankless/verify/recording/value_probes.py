"""Record every value of one job call: on several workers as it runs, on one worker beside the plain call.

Note [value probes]: the program is lowered once more, with a probe after every operator of the logical program. A probe
gathers the value and records a few numbers of it. Operators, collectives and their order are unchanged, so a fault
shows in the value where it begins. On one worker the same logical program runs whole. It is functional and the random
state is restored, so the plain call that follows is unchanged.

Each rank writes a file of values, each value in a few numbers.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from rankless.collectives.mesh_collectives import all_gather
from rankless.compiler.capture.result_structure import flatten_result
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue, ProgramInput, ProgramOutput
from rankless.compiler.local_program import LocalProgram, generate_function
from rankless.compiler.lowering.local_graph import LocalGraph
from rankless.compiler.lowering.lower import LoweringPass
from rankless.compiler.scheduling.gradient_buckets import schedule_gradients
from rankless.compiler.scheduling.gradient_buckets_and_state_storage import StateStorage
from rankless.compiler.scheduling.parameter_gathers import gather_parameters
from rankless.compiler.sharding.redistribute import Redistribution
from rankless.compiler.sharding.sharding_propagation import ShardedProgram, propagate_shardings
from rankless.config.run_config import InspectedCall
from rankless.context.world import World
from rankless.jobs.arguments import FlattenedArguments, get_shardings
from rankless.jobs.job_definition import JobDefinition
from rankless.jobs.programs.program_cache import ProgramCache
from rankless.parallel.default_generator import restore_generators, save_generators
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Replicate, Sharding, compute_local_shape
from rankless.records.verify_recording_format import ComputedValue, Role, encode_result, values_file
from rankless.user_code import user_line
from rankless.verify.recording.tensor_sketch import Sketcher


class ValueInspector:
    """Inspects one job call: implements `context.world.CallInspector` with one rank's file of values."""

    def __init__(self, folder: str, rank: int, inspected: InspectedCall) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._stream = values_file(folder, rank).open("wb")
        self._inspected = inspected
        self._calls = 0
        self._sketches = Sketcher()

    def count_call(self, job: str) -> bool:
        """Count a call of a job, and return whether it is the one to inspect."""
        self._calls += job == self._inspected.job
        return job == self._inspected.job and self._calls == self._inspected.call

    def instrument(
        self, program: LocalProgram, world: World
    ) -> Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]:
        """Return a program that also records its values, for the call that runs now."""
        return add_probes(program.sharded, program.storage.with_new_memory(), world.mesh, self)

    def run_alongside(self, job: JobDefinition, world: World, arguments: FlattenedArguments) -> None:
        """Run the job's logical program whole on one worker and record its values, without side effects."""
        world.joint.join_job(job, world).repeat_call("rankless verify searches for the first value that differs")
        programs = ProgramCache(job, world)
        bound = programs.capture_exactly(programs.look_up(arguments, get_shardings(arguments, world.mesh)))
        states = save_generators(bound.captured.program.generators)
        sources = bound.sources
        values = sources.collect([arguments.tensors[number] for number in sources.arguments])
        # Replicate everything, so that only PyTorch's own operators run, and none of Rankless.
        sharded = propagate_shardings(bound.captured.program, [(Replicate(),)] * len(arguments.tensors), [1])
        add_probes(sharded, StateStorage(), world.mesh, self)(values, ())
        restore_generators(states)

    def record_plain(self, job: JobDefinition, result: Any) -> None:
        """Record the results of the plain call under the names of the program's outputs."""
        found: dict[str, Tensor] = {}
        leaves = [leaf for leaf in flatten_result(result)[0] if isinstance(leaf, Tensor)]
        for index, leaf in enumerate(leaves, start=int(job.trains)):
            found[format_output_name("result", f"result {index}")] = leaf
        if job.trains:
            found |= get_plain_gradients(job)
        for name, tensor in found.items():
            self.record("plain", name, tensor, operator="", line=job.line, inputs=())

    def record(
        self, role: Role, name: str, tensor: Tensor, *, operator: str, line: str, inputs: tuple[str, ...]
    ) -> None:
        """Record a whole value."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        value = ComputedValue(
            role, name, operator, line, dtype, tuple(tensor.shape), self._sketches.sketch(tensor), inputs
        )
        self._stream.write(encode_result(value))
        self._stream.flush()


def gather_whole(local: Tensor, shape: Sequence[int], sharding: Sharding, mesh: Mesh) -> Tensor:
    """Return a value of this shape gathered from all ranks' shards; a replicated value stays as this rank has it."""
    ranks = [axis.rank for axis in mesh.axes]
    for number, (axis, placement) in reversed(list(enumerate(zip(mesh.axes, sharding, strict=True)))):
        if not isinstance(placement, Replicate) and axis.size > 1:
            together = compute_local_shape(shape, sharding[:number], ranks[:number])
            gather = Redistribution(axis, placement, Replicate())
            # Not every backend gathers booleans.
            sent = local.to(torch.uint8) if local.dtype == torch.bool else local
            local = gather(sent, *gather.list_lengths(together)).to(local.dtype)
    return local


@dataclass(frozen=True, kw_only=True)
class ValueProbe:
    """A step of a program that records one value."""

    recorder: ValueInspector
    mesh: Mesh
    shape: tuple[int, ...]
    sharding: Sharding
    role: Role
    name: str
    operator: str
    line: str
    inputs: tuple[str, ...]

    __name__ = "tap"

    def __call__(self, local: Any) -> None:
        """Record the value if it is a tensor."""
        if isinstance(local, Tensor):
            self.recorder.record(
                self.role,
                self.name,
                gather_whole(local, self.shape, self.sharding, self.mesh),
                operator=self.operator,
                line=self.line,
                inputs=self.inputs,
            )


def add_probes(
    sharded: ShardedProgram, storage: StateStorage, mesh: Mesh, recorder: ValueInspector
) -> Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]:
    """Return a program with the same results that also records its values; call it for the current call only."""
    logical = sharded.logical
    lowering = LoweringPass(sharded, mesh)
    local = lowering.lower_graph()
    call_line = user_line(sys._getframe(1))
    insert_probes(lowering, local, mesh, recorder, call_line)
    local = schedule_gradients(gather_parameters(local, logical, storage), logical, storage)
    program = LocalProgram(
        inputs=tuple(described for _, described in local.inputs),
        outputs=tuple(described for _, described in local.outputs),
        function=generate_function(local.graph),
        sharded=sharded,
        storage=storage,
        collectives=(),
        workers=mesh.size,
    )

    def run(inputs: Sequence[Tensor], sizes: Sequence[int] = ()) -> Sequence[Tensor]:
        assert not sizes, "a program with varying sizes cannot be inspected"
        outputs = program(inputs)
        for output, described, (node, _) in zip(outputs, program.outputs, logical.outputs, strict=True):
            recorder.record(
                "output",
                format_output_name(described.kind, described.name),
                gather_output(output, described, storage, mesh, node.meta["val"].shape),
                operator=format_operator_name(node),
                line=str(node.meta.get("line", "")),
                inputs=(format_value_name(node, logical),),
            )
        return outputs

    return run


def insert_probes(
    lowering: LoweringPass, local: LocalGraph, mesh: Mesh, recorder: ValueInspector, call_line: str
) -> None:
    """Add a probe after each value of a local graph.

    Args:
        lowering: Has made the graph.
        local: The graph.
        mesh: The workers.
        recorder: Records the values.
        call_line: The script's line of the call, for the inputs.
    """
    logical = lowering.sharded.logical
    for node, sharding, value in choose_local_values(lowering):
        is_input = node in logical.inputs
        tap = ValueProbe(
            recorder=recorder,
            mesh=mesh,
            shape=get_shape(node),
            sharding=sharding,
            role="input" if is_input else "value",
            name=format_value_name(node, logical),
            operator="" if is_input else format_operator_name(node),
            line=call_line if is_input else str(node.meta.get("line", "")),
            inputs=tuple(format_value_name(item, logical) for item in node.all_input_nodes),
        )
        with local.graph.inserting_after(value):
            local.graph.call_function(tap, (value,))


def get_shape(node: fx.Node) -> tuple[int, ...]:
    """Return the logical shape of a value; an empty one for what is no tensor."""
    value = node.meta["val"]
    return value.shape if isinstance(value, LogicalValue) else ()


def gather_output(
    output: Tensor, described: ProgramOutput, storage: StateStorage, mesh: Mesh, shape: Sequence[int]
) -> Tensor:
    """Return an output, of this shape, as a whole, if this rank has a shard of it."""
    if described.kind == "gradient" and described.name in storage.shardings:
        return gather_whole(output, shape, storage.shardings[described.name], mesh)
    placement = storage.gradients.get(described.name) if described.kind == "gradient" else None
    if placement is None or storage.axis is None:
        return output
    return all_gather(output, among=storage.axis, dim=placement.dim, lengths=placement.lengths)


def choose_local_values(lowering: LoweringPass) -> list[tuple[fx.Node, Sharding, fx.Node]]:
    """Return each logical value, its sharding, and the local value.

    A draw by counter may be there in the shardings of its uses only.
    """
    chosen = []
    for node, found in lowering.values.items():
        sharding = lowering.sharded.sharding(node)
        if found:
            sharding = sharding if sharding in found else next(iter(found))
            chosen.append((node, sharding, found[sharding]))
    return chosen


def get_plain_gradients(job: JobDefinition) -> Mapping[str, Tensor]:
    """Return the gradients of a job's parameters by the names of the program's outputs."""
    return {
        format_output_name("gradient", name): parameter.grad
        for model, module in job.modules.items()
        for name, parameter in module.named_parameters(model)
        if parameter.grad is not None
    }


def format_input_name(given: ProgramInput) -> str:
    """Return an input's name in words, as "parameter model.0.weight" or "argument 1"."""
    return given.name if given.kind == "argument" else f"{given.kind} {given.name}"


def format_value_name(node: fx.Node, logical: LogicalProgram) -> str:
    """Return the name under which a value of a program is recorded."""
    return format_input_name(logical.inputs[node]) if node in logical.inputs else str(node.name)


def format_output_name(kind: str, name: str) -> str:
    """Return an output's name in words."""
    return {"gradient": f"gradient of {name}", "mutation": f"new value of {name}"}.get(kind, name)


def format_operator_name(node: fx.Node) -> str:
    """Return an operator's name without its overload, as "native_layer_norm", also for one of several outputs."""
    if "getitem" in str(node.target):
        return format_operator_name(node.all_input_nodes[0])
    return str(node.target).removeprefix("aten.").removeprefix("rankless.").rpartition(".")[0] or str(node.target)
