"""Measure how long the operators of a program take, to balance the stages of a pipeline.

Every operator runs alone, on values of its own shapes, dtypes and device: zeros for integers, which are valid as
indices, and one half for all else. Operators with the same arguments are measured once. One that draws numbers, works
on sparse values or fails on such values is estimated: it gets the share that `stages.estimate_work` gives it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.benchmark import Timer

from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.compiler.pipeline_parallel.random_draws import draws_numbers
from rankless.compiler.pipeline_parallel.stages import estimate_work, list_forward
from rankless.compiler.tracing.symbolic_sizes import size_hint

RUNS = 5
"""How often an operator is measured. The fastest run counts: others may have waited for other processes."""

ENOUGH_SECONDS = 0.1
"""A slow operator is measured until its runs have taken so long: other ranks wait."""


def measure_work(program: LogicalProgram) -> list[float]:
    """Return the seconds of each operator of the forward pass, in order, with those of its module's backward pass.

    Args:
        program: The program.
    """
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
