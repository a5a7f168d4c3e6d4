"""Cut a logical program into the stages of a pipeline, at borders of modules, by estimated or measured work.

Note [stages]: the forward pass is cut by position, so values flow from earlier stages to later ones whatever the model
does. What depends on arguments, constants and buffers alone is computed wherever it is needed; see `find_free`. An
operator of the backward pass belongs to the stage of the module whose gradient it computes, but never to a later stage
than what it takes from the backward pass. Operators outside of modules follow their inputs. A parameter belongs to the
first stage that uses it. All of this decides who computes, never what is computed.

Note [measured work]: to balance stages by time, `measure_work` runs the operators of a program. Every operator runs
alone, on values of its own shapes, dtypes and device: zeros for integers, which are valid as indices, and one half for
all else. Operators with the same arguments are measured once. One that draws numbers, works on sparse values or fails
on such values is estimated: it gets the share that `estimate_work` gives it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.benchmark import Timer

from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.compiler.pipeline_parallel.random_draws import draws_numbers
from rankless.compiler.pipeline_parallel.schedules import Schedule, StageWorkers
from rankless.compiler.pipeline_parallel.stage_value_streams import Transport
from rankless.compiler.tensor_parallel import count_value_bytes
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import Shard

aten = torch.ops.aten
rankless_ops = torch.ops.rankless

OPERATIONS_PER_BYTE = 4.0
"""Additions and multiplications in the time in which a processor reads or writes one byte."""
OPERATIONS_PER_SENT_BYTE = 16.0
"""The same for a byte that is sent to the next stage."""
PRODUCTS = (
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    rankless_ops.linear.default,
)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of a program.

    Attributes:
        of (Mapping[fx.Node, int]): The stage of each operator.
        owners (Mapping[str, int]): The stage of each parameter by name, tied ones under each of their names.
        borders (tuple[str, ...]): The module at which each stage but the first begins, as "model.layers.3".
    """

    count: int
    of: Mapping[fx.Node, int]
    owners: Mapping[str, int]
    borders: tuple[str, ...]


def find_stages(
    program: LogicalProgram,
    count: int,
    names: Mapping[str, str],
    owners: Mapping[str, int] | None = None,
    borders: Sequence[str] | None = None,
    work: Sequence[float] | None = None,
) -> Stages:
    """Return the stages of a program; see Note [stages].

    Args:
        names: For each name of a parameter its first name, which differs if it is tied.
        owners: The stages of parameters that have one already.
        borders: The modules at which stages after the first begin. Default: stages get about equal work.
        work: The work of each operator of the forward pass, in any unit. Default: estimates.
    """
    free = find_free(program)
    forward = list_forward(program)
    if owners:
        starts = follow_owners(program, forward, count, owners)
    elif borders is not None:
        starts = [find_start(forward, name) for name in borders]
    else:
        starts = balance(program, forward, free, count, work)
    of: dict[fx.Node, int] = {}
    for position, node in enumerate(forward):
        of[node] = sum(start <= position for start in starts)
        if node.target is getitem:
            of[node] = of[node.all_input_nodes[0]]
    assign_backward(program, of, free, count)
    return Stages(
        count=count,
        of=of,
        owners=find_owners(program, of, count, names) | dict(owners or {}),
        borders=tuple(name_border(forward, start) for start in starts),
    )


def place_added(program: LogicalProgram, stages: Stages) -> Stages:
    """Return the stages of a program to which operators have been added: each of these follows what it takes.

    Sums of the results of experts are in another order once the program has shardings.
    """
    of, forward = dict(stages.of), set(list_forward(program))
    for node in program.graph.nodes:
        if node.op != "call_function" or node in of:
            continue
        taken = [of[value] for value in node.all_input_nodes if value in of and (value in forward) == (node in forward)]
        of[node] = max(taken, default=0) if node in forward else min(taken, default=stages.count - 1)
    return replace(stages, of=of)


def find_free(program: LogicalProgram) -> frozenset[fx.Node]:
    """Return the values that every worker can compute for itself: they depend on no parameter and no random number."""
    free: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node in program.inputs:
            is_free = program.inputs[node].kind != "parameter"
        else:
            is_free = node.op == "call_function" and not draws_numbers(node)
        if is_free and all(value in free for value in node.all_input_nodes):
            free.add(node)
    return frozenset(free)


def list_forward(program: LogicalProgram) -> list[fx.Node]:
    """Return the operators of the forward pass, with those of an inner backward pass that it needs."""
    operators = [node for node in program.graph.nodes if node.op == "call_function"]
    needed: set[fx.Node] = set()
    for node in reversed(operators):
        if node in needed or not node.meta.get("backward"):
            needed.add(node)
            needed.update(node.all_input_nodes)
    return [node for node in operators if node in needed]


def balance(
    program: LogicalProgram,
    forward: Sequence[fx.Node],
    free: frozenset[fx.Node],
    count: int,
    measured: Sequence[float] | None,
) -> list[int]:
    """Return the positions at which the stages but the first begin, for about equal work and little to send.

    It minimizes the work of the largest stage and the bytes that cross borders, by dynamic programming over borders of
    modules. Each stage has parameters of its own, if that is possible.
    """
    estimates = [0.0 if node in free else estimate_work(node) for node in forward]
    if measured is not None:  # in the unit of the estimates, for which the cost of sending is known
        own = [0.0 if node in free else amount for node, amount in zip(forward, measured, strict=True)]
        unit = sum(estimates) / max(sum(own), 1e-12)
        estimates = [amount * unit for amount in own]
    work = [0.0, *accumulate(estimates)]
    owned = [0, *accumulate(count_first_uses(program, forward))]
    candidates = list_borders(forward)
    sent = dict(zip(candidates, count_crossing(forward, free, candidates), strict=True))
    for owns in (True, False):  # a model with fewer parameters than stages has stages without any
        stages = StageCosts(work, owned if owns else list(range(len(work))), sent, [*candidates, len(forward)])
        found = stages.cut(count)
        if found is not None:
            return found
    return list(range(1, count))


@dataclass(frozen=True)
class StageCosts:
    """What stages cost that begin and end at given positions of the forward pass.

    Attributes:
        work (Sequence[float]): The work before each position.
        owned (Sequence[int]): How many parameters are used before each position. A stage is the first to use some.
        sent (Mapping[int, float]): The bytes that cross a border at a position.
        ends (Sequence[int]): The positions at which a stage may end.
    """

    work: Sequence[float]
    owned: Sequence[int]
    sent: Mapping[int, float]
    ends: Sequence[int]

    def cut(self, count: int) -> list[int] | None:
        """Return the best positions at which the stages but the first begin; None if there are none."""
        best = {end: (self.work[end], 0.0, list[int]()) for end in self.ends if self.owned[end]}
        for _ in range(count - 1):
            found = {}
            for end in self.ends:
                options = [
                    self._add(best[start], start, end)
                    for start in self.ends
                    if start < end and start in best and self.owned[start] < self.owned[end]
                ]
                if options:
                    found[end] = min(options, key=lambda option: option[0] + option[1])
            best = found
        last = best.get(self.ends[-1])
        return None if last is None else last[2]

    def _add(self, before: tuple[float, float, list[int]], start: int, end: int) -> tuple[float, float, list[int]]:
        """Return the work of the largest stage, the cost of what is sent, and the borders, with one stage more."""
        largest, sent, starts = before
        added = self.work[end] - self.work[start]
        return max(largest, added), sent + self.sent[start] * OPERATIONS_PER_SENT_BYTE, [*starts, start]


def count_first_uses(program: LogicalProgram, forward: Sequence[fx.Node]) -> list[int]:
    """Return for each operator of the forward pass how many parameters it is the first to use."""
    known: set[fx.Node] = set()
    counts = []
    for node in forward:
        new = {
            value
            for value in node.all_input_nodes
            if value in program.inputs and program.inputs[value].kind == "parameter" and value not in known
        }
        known |= new
        counts.append(len(new))
    return counts


def find_start(forward: Sequence[fx.Node], name: str) -> int:
    """Return the position of the first operator of a module."""
    return next(position for position, node in enumerate(forward) if name in list_prefixes(node))


def list_borders(forward: Sequence[fx.Node]) -> list[int]:
    """Return the positions after the first at which a module begins."""
    known: set[str] = set()
    borders = []
    for position, node in enumerate(forward):
        names = list_prefixes(node)
        if any(name not in known for name in names) and position > 0:
            borders.append(position)
        known.update(names)
    return borders


def list_prefixes(node: fx.Node) -> list[str]:
    """Return the paths of the module that computes a value and of those around it, from the outermost."""
    module = node.meta.get("module")
    if module is None:
        return []
    parts = module.path.split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def name_border(forward: Sequence[fx.Node], start: int) -> str:
    """Return the outermost module that begins at a position; the line if none does."""
    if start >= len(forward):
        return ""
    known = {name for node in forward[:start] for name in list_prefixes(node)}
    names = [name for name in list_prefixes(forward[start]) if name not in known]
    return names[0] if names else str(forward[start].meta.get("line", ""))


def count_crossing(forward: Sequence[fx.Node], free: frozenset[fx.Node], borders: Sequence[int]) -> list[float]:
    """Return for each border the bytes that are computed before it and used after it."""
    position = {node: number for number, node in enumerate(forward)}
    last_use: dict[fx.Node, int] = {}
    for node in forward:
        for value in node.all_input_nodes:
            if value in position and value not in free:
                last_use[value] = position[node]
    return [
        sum(
            count_value_bytes(value.meta.get("val"))
            for value, last in last_use.items()
            if position[value] < border <= last
        )
        for border in borders
    ]


def estimate_work(node: fx.Node) -> float:
    """Return about how many additions and multiplications an operator takes, with those for its memory."""
    work = OPERATIONS_PER_BYTE * count_value_bytes(node.meta.get("val"))
    value, inputs = node.meta.get("val"), [item.meta["val"] for item in node.all_input_nodes]
    shapes = [[int(size_hint(size)) for size in item.shape] for item in inputs if isinstance(item, LogicalValue)]
    if not isinstance(value, LogicalValue):
        value = next((item for item in value or () if isinstance(item, LogicalValue)), None)
    if value is None or not shapes:
        return work
    elements = float(size_hint(value.numel()))
    if node.target in PRODUCTS:
        first = 1 if node.target in (aten.addmm.default, aten.baddbmm.default) else 0
        work += 2 * elements * shapes[first][-1]
    elif node.target is aten.convolution.default:
        work += 2 * elements * float(torch.Size(shapes[1][1:]).numel())
    elif "attention" in str(node.target):
        work += 4 * elements * shapes[1][-2]
    return work


def follow_owners(
    program: LogicalProgram, forward: Sequence[fx.Node], count: int, owners: Mapping[str, int]
) -> list[int]:
    """Return the positions at which stages begin so that each computes with its own parameters, where it can.

    A stage begins with the outermost module in which only its own parameters were used, also before it uses one.
    """
    starts: list[int] = []
    begun: dict[str, int] = {}
    last_use = -1
    for position, node in enumerate(forward):
        for name in list_prefixes(node):
            begun.setdefault(name, position)
        used = [
            owners[program.inputs[value].name]
            for value in node.all_input_nodes
            if value in program.inputs and program.inputs[value].name in owners
        ]
        start = min([position, *(begun[name] for name in list_prefixes(node) if begun[name] > last_use)])
        starts += [start] * (max(used, default=0) - len(starts))
        last_use = position if used else last_use
    return starts + [len(forward)] * (count - 1 - len(starts))


def assign_backward(program: LogicalProgram, of: dict[fx.Node, int], free: frozenset[fx.Node], count: int) -> None:
    """Give each remaining operator its stage; see Note [stages]."""
    places: dict[str, set[int]] = {}
    for node, stage in of.items():
        if node not in free and node.meta.get("module") is not None:
            places.setdefault(node.meta["module"].path, set()).add(stage)
    forward = frozenset(of)
    for node in program.graph.nodes:
        if node.op != "call_function" or node in of:
            continue
        taken = [of[value] for value in node.all_input_nodes if value in of and value not in forward]
        if node.target is getitem:
            of[node] = of[node.all_input_nodes[0]]
            continue
        latest = min(taken, default=count - 1)
        module = node.meta.get("module")
        stages = places.get(module.path, set()) if module is not None else set()
        of[node] = max((stage for stage in stages if stage <= latest), default=latest)


def find_owners(
    program: LogicalProgram, of: Mapping[fx.Node, int], count: int, names: Mapping[str, str]
) -> dict[str, int]:
    """Return the stage of each parameter: the first that uses it in the forward pass."""
    first: dict[str, int] = {}
    for node, described in program.inputs.items():
        if described.kind == "parameter":
            used = [of[user] for user in node.users if user in of and not user.meta.get("backward")]
            name = names[described.name]
            first[name] = min(first.get(name, count - 1), *used, count - 1)
    return {name: first.get(kept, count - 1) for name, kept in names.items()}


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a program is cut for a pipeline.

    Attributes:
        batch_lengths (tuple[Shard | None, ...]): How each tensor argument is divided into microbatches, if it is.
        exchanged (tuple[Shard | None, ...]): How the workers along the axis `expert` hold each argument that
            microbatches divide; see Note [arguments of microbatches].
    """

    axis: MeshAxis
    stages: Stages
    stage_workers: StageWorkers
    schedule: Schedule
    microbatches: int
    batch_lengths: tuple[Shard | None, ...]
    transport: Transport
    exchanged: tuple[Shard | None, ...] = ()


RUNS = 5
"""How often an operator is measured. The fastest run counts: others may have waited for other processes."""

ENOUGH_SECONDS = 0.1
"""A slow operator is measured until its runs have taken so long: other ranks wait."""


def measure_work(program: LogicalProgram) -> list[float]:
    """Return the seconds of each operator of the forward pass, in order, with those of its module's backward pass."""
    operators = [node for node in program.graph.nodes if node.op == "call_function"]
    seconds = fill_gaps(operators, measure_operators(operators))
    forward = list_forward(program)
    found = {node: seconds[node] for node in forward}
    first: dict[str, fx.Node] = {}
    for node in forward:
        if node.meta.get("module") is not None:
            first.setdefault(node.meta["module"].path, node)
    for node in operators:
        if node not in found:
            module = node.meta.get("module")
            place = first.get(module.path, forward[-1]) if module is not None else forward[-1]
            found[place] += seconds[node]
    return [found[node] for node in forward]


def measure_operators(operators: Sequence[fx.Node]) -> dict[fx.Node, float]:
    """Return the seconds of those operators that can be measured."""
    known: dict[str, float | None] = {}
    found: dict[fx.Node, float] = {}
    with torch.no_grad():
        for node in operators:
            if not isinstance(node.target, torch._ops.OpOverload) or draws_numbers(node):
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])
            args, kwargs = pytree.tree_map(size_hint, (args, kwargs))
            key = repr((node.target, args, kwargs))
            if key not in known:
                known[key] = measure_call(node.target, args, kwargs)
            seconds = known[key]
            if seconds is not None:
                found[node] = seconds
    return found


def measure_call(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """Return the seconds of a call of an operator; None if it cannot run on made-up values.

    Args:
        operator: The operator.
        args: Its arguments, with descriptions of values in place of tensors.
        kwargs: Those by name.
    """
    try:
        values, named = pytree.tree_map(make_value, (args, dict(kwargs)))
        operator(*values, **named)
    except Exception:  # whatever a kernel raises for values that the script would not give it
        return None
    timer = Timer(
        "operator(*values, **named)",
        globals={"operator": operator, "values": values, "named": named},
        num_threads=torch.get_num_threads(),
    )
    times: list[float] = []
    while len(times) < RUNS and sum(times) < ENOUGH_SECONDS:
        times.append(float(timer.timeit(1).mean))
    return min(times)


def make_value(described: Any) -> Any:
    """Return a tensor for a description of one, and any other argument as it is."""
    if not isinstance(described, LogicalValue):
        return described
    if described.is_sparse:
        raise NotImplementedError("values of sparse tensors")
    shape = [int(size_hint(size)) for size in described.shape]
    strides = [int(size_hint(stride)) for stride in described.strides]
    is_float = described.dtype.is_floating_point or described.dtype.is_complex
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    number = 0.5 if is_float else described.dtype == torch.bool
    memory: Tensor = torch.full((length,), number, dtype=described.dtype, device=described.device)
    return memory.as_strided(shape, strides)


def fill_gaps(operators: Sequence[fx.Node], measured: Mapping[fx.Node, float]) -> dict[fx.Node, float]:
    """Return the seconds of all operators: others take as much longer than estimated as the measured ones do."""
    estimates = {node: estimate_work(node) for node in operators}
    total = sum(estimates[node] for node in measured)
    scale = sum(measured.values()) / total if total else 1.0
    return {node: measured.get(node, scale * estimates[node]) for node in operators}
