"""Generate straight-line Python code for one rank's program, and call it below autograd.

The part of a program that computes the ids of its lookups is a program of its own (`IdsProgram`). It can run before
the call, to ask for rows early (`context.extension_participants`).
"""

import linecache
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from rankless.compiler.capture.trace_errors import GENERATED_FILE, SCRIPT_LINES, find_generated_line, offer_whole_batch
from rankless.compiler.ir.logical_program import LogicalProgram, ProgramInput, ProgramOutput
from rankless.compiler.lowering.lower import lower, without_overwriting
from rankless.compiler.probing.operator_probe import OperatorProbe
from rankless.compiler.rules.extension_operators import Lookup
from rankless.compiler.scheduling.gradient_buckets import schedule_gradients
from rankless.compiler.scheduling.gradient_buckets_and_state_storage import StateStorage
from rankless.compiler.scheduling.parameter_gathers import gather_parameters
from rankless.compiler.sharding.redistribute import CollectiveRecord
from rankless.compiler.sharding.sharding_propagation import ShardedProgram, propagate_shardings
from rankless.compiler.tracing.symbolic_sizes import EXPRESSION_GLOBALS, format_expression, is_symbolic
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Sharding
from rankless.records.job_programs import PipelineRecord

_NAMESPACES = ("aten", "prims")


class IdsProgram(NamedTuple):
    """A program of ids, which draws, sends and changes nothing.

    Args:
        function: Takes the values of the whole program's inputs, and returns the ids of each lookup.
        sources: The number of what has the rows of each lookup.
    """

    function: Callable[..., Sequence[Tensor]]
    sources: tuple[int, ...]

    def __call__(self, values: Sequence[Tensor], sizes: Sequence[int] = ()) -> list[tuple[int, Tensor]]:
        """Return the source and the ids of each lookup, in the order of the program."""
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            return list(zip(self.sources, self.function(*sizes, *values), strict=True))


def find_lookup_ids(graph: fx.Graph) -> tuple[fx.Graph, tuple[int, ...]] | None:
    """Return the part of a rank's program that computes the ids of lookups, and the number of what has each one's rows.

    These are lookups whose ids follow from the program's inputs, without other ranks and random numbers. The part has
    all inputs of the program. None if there are no such lookups.
    """
    lookups = [node for node in graph.nodes if isinstance(node.target, Lookup)]
    known: dict[fx.Node, bool] = {}
    found = []
    for node in graph.nodes if lookups else ():
        known[node] = node.op == "placeholder" or (_is_pure(node) and all(known[each] for each in node.all_input_nodes))
    for node in lookups:
        _, ids, source, *_ = node.args
        if isinstance(ids, fx.Node) and known[ids] and isinstance(source, int):
            found.append((source, ids))
    if not found:
        return None
    return _copy_part(graph, [ids for _, ids in found]), tuple(source for source, _ in found)


def _is_pure(node: fx.Node) -> bool:
    """Return whether an operator depends on nothing but its arguments, and changes nothing."""
    if "collective" in node.meta:
        return False
    target = without_overwriting(node.target)
    if not isinstance(target, torch._ops.OpOverload):
        return target is getitem
    is_plain = target.namespace in _NAMESPACES and not target._schema.is_mutable
    return is_plain and torch.Tag.nondeterministic_seeded not in target.tags


def _copy_part(graph: fx.Graph, wanted: Iterable[fx.Node]) -> fx.Graph:
    """Return a graph of all inputs, and of what the wanted values need. Its output is the wanted values."""
    wanted = list(wanted)
    needed, rest = set(wanted), list(wanted)
    while rest:
        inputs = [each for each in rest.pop().all_input_nodes if each not in needed]
        needed.update(inputs)
        rest += inputs
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = part.placeholder(node.name)
        elif node in needed:
            # The arguments are set afterwards: PyTorch warns about sizes among the arguments of a new node.
            copies[node] = copy = part.call_function(without_overwriting(node.target))
            copy.args = fx.map_arg(node.args, copies.__getitem__)
            copy.kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
            copy.meta["line"] = node.meta.get("line", "")
    part.output(tuple(copies[node] for node in wanted))
    return part


@dataclass(frozen=True, kw_only=True)
class LocalProgram:
    """The program that one rank runs.

    `function` takes the varying sizes and the values of `inputs`, and returns those of `outputs`.
    """

    inputs: tuple[ProgramInput, ...]
    outputs: tuple[ProgramOutput, ...]
    function: Callable[..., Sequence[Tensor]]
    sharded: ShardedProgram
    storage: StateStorage
    """Which of its states this worker holds in pieces."""
    collectives: tuple[CollectiveRecord, ...]
    workers: int
    """The number of workers of the mesh."""
    recomputed: int = 0
    """The number of operators of the forward pass that the backward pass computes again."""
    pipeline: PipelineRecord | None = None
    """The stages, on a mesh with the axis `pipeline`."""
    time_axis: int | None = None
    """The place of the axis of microbatches among those of `sharded`, in a pipeline."""
    takers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """With heterogeneous workers: for each argument the workers that take it, by their ranks along the pipeline."""
    ids: IdsProgram | None = None
    """Computes the ids of lookups alone; None if there are none that could be known early."""

    def __call__(self, values: Sequence[Tensor], sizes: Sequence[int] = ()) -> Sequence[Tensor]:
        """Run the program once, without recording gradients and with the captured casts of autocast.

        An error of an operator gets a note with the script's line.
        """
        try:
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
                return self.function(*sizes, *values)
        except Exception as error:  # operators are foreign code, and the user does not know this program's lines
            if origin := describe_origin(error):
                error.add_note(origin)
            raise


def describe_origin(error: Exception) -> str:
    """Return the script's line of an error in generated code as text; empty if it is unknown."""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if line := find_generated_line(frame, number):
            file, _, place = line.rpartition(":")
            text = linecache.getline(file, int(place)).strip() if place.isdigit() else ""
            return f"in the job's line {line}" + (f": {text}" if text else "")
    return ""


def generate_function(graph: fx.Graph, sizes: Sequence[str] = ()) -> Callable[..., Sequence[Tensor]]:
    """Return a graph as one Python function: one assignment per node, each value deleted after its last use.

    `sizes` names the varying sizes, its first parameters.
    """
    code = CodeWriter(sizes)
    last_use = {}
    for node in graph.nodes:
        for value in node.all_input_nodes:
            last_use[value] = node
    for node in graph.nodes:
        if node.op == "placeholder":
            code.parameters.append(node.name)
        elif node.op == "output":
            code.lines.append(f"return ({''.join(f'{value.name}, ' for value in node.args[0])})")
            continue
        else:
            arguments = [code.text(item) for item in node.args]
            arguments += [f"{key}={code.text(item)}" for key, item in node.kwargs.items()]
            code.lines.append(f"{node.name} = {code.constant(node.target)}({', '.join(arguments)})")
            code.origins[len(code.lines)] = node.meta.get("line", "")
        # A value's memory is free after its last use, as in the script, where no name refers to it any more.
        dropped = [value.name for value in node.all_input_nodes if last_use.get(value) is node]
        if node not in last_use:
            dropped.append(node.name)
        if dropped:
            code.lines.append(f"del {', '.join(dropped)}")
    return code.function()


class CodeWriter:
    """Collects lines of code and the constants that they use."""

    def __init__(self, sizes: Sequence[str]) -> None:
        self.parameters: list[str] = list(sizes)
        self.lines: list[str] = []
        self.origins: dict[int, str] = {}
        self.constants: dict[str, Any] = dict(EXPRESSION_GLOBALS)
        self.computed: dict[str, str] = {}

    def text(self, argument: Any) -> str:
        """Return an argument as code."""
        if isinstance(argument, fx.Node):
            return argument.name
        if argument is None or isinstance(argument, bool | int | str):
            return repr(argument)
        if is_symbolic(argument):
            return self.size(format_expression(argument))
        if isinstance(argument, list):
            return f"[{', '.join(map(self.text, argument))}]"
        if type(argument) in (tuple, torch.Size):
            return f"({''.join(f'{self.text(item)}, ' for item in argument)})"
        return self.constant(argument)

    def size(self, expression: str) -> str:
        """Return the name of a number that depends on varying sizes; each is computed once per call."""
        if expression not in self.computed:
            self.computed[expression] = f"size_{len(self.computed)}"
        return self.computed[expression]

    def constant(self, value: Any) -> str:
        """Return the name of a constant."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name

    def function(self) -> Callable[..., Sequence[Tensor]]:
        """Compile the lines into a function."""
        computed = [f"{name} = {expression}" for expression, name in self.computed.items()]
        body = "\n    ".join(computed + self.lines)
        source = f"def program({', '.join(self.parameters)}):\n    {body}\n"
        first = 1 + len(computed)
        self.constants[SCRIPT_LINES] = {first + position: line for position, line in self.origins.items()}
        exec(compile(source, GENERATED_FILE, "exec"), self.constants)
        function: Callable[..., Sequence[Tensor]] = self.constants["program"]
        return function


def build_local_program(
    program: LogicalProgram,
    argument_shardings: Sequence[Sharding],
    mesh: Mesh,
    *,
    storage: StateStorage | None = None,
    sizes: Sequence[str] = (),
    probe: OperatorProbe | None = None,
) -> LocalProgram:
    """Shard, lower and schedule a logical program for the rank of `mesh`.

    Args:
        storage: The memory of gradients, and which states a worker holds in pieces. Default: new memory, and none.
        probe: Probes operators without a rule. None leaves them whole. With it the call is collective.
    """
    storage = storage or StateStorage()
    sizes_of_axes = [axis.size for axis in mesh.axes]
    with offer_whole_batch():
        sharded = propagate_shardings(program, argument_shardings, sizes_of_axes, probe, storage.shardings)
    local = lower(sharded, mesh)
    local = gather_parameters(local, program, storage)
    local = schedule_gradients(local, program, storage)
    known_ids = find_lookup_ids(local.graph)
    return LocalProgram(
        inputs=tuple(described for _, described in local.inputs),
        outputs=tuple(described for _, described in local.outputs),
        function=generate_function(local.graph, sizes),
        sharded=sharded,
        storage=storage,
        collectives=local.collectives,
        workers=mesh.size,
        recomputed=local.recomputed,
        ids=known_ids and IdsProgram(generate_function(known_ids[0], sizes), known_ids[1]),
    )
