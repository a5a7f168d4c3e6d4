"""Simulate N ranks in one process to test capture, sharding and lowering; see `simulated_programs`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from simulated_programs import ROLES, interpret
from support.devices import DEVICE, get_random_state, set_random_state
from torch import Tensor, fx, nn

from rankless.compiler.capture.capture import ArgumentShape, JobSource, capture
from rankless.compiler.capture.trace_to_program import named_tensors
from rankless.compiler.ir.local_kernels import join_blocks
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.ir.memory_order import find_memory_order
from rankless.compiler.ir.tensor_parts import list_parts, take_parts
from rankless.compiler.lowering.local_graph import LocalGraph
from rankless.compiler.lowering.lower import lower
from rankless.compiler.probing.operator_probe import OperatorProbe
from rankless.compiler.sharding.sharding_propagation import ShardedProgram, propagate_shardings
from rankless.compiler.tracing.symbolic_sizes import SymbolicSizes, compile_guards
from rankless.ownership.shard_layout import ShardLayout
from rankless.parallel.mesh import Mesh, MeshAxis
from rankless.parallel.tensor_placement import (
    BlockedShard,
    OnRank,
    Placement,
    Replicate,
    Shard,
    Sharding,
    read_stored,
    split_lengths,
)


@dataclass(frozen=True)
class Outcome:
    """The results of the ranks' programs, which are asserted to be equal on all ranks."""

    results: list[Tensor]
    gradients: dict[str, Tensor]
    mutations: dict[str, Tensor]
    sharded: ShardedProgram
    local: LocalGraph
    largest_terms: dict[str, float]
    """For each gradient that is a sum over the ranks, the largest entry of a rank's term."""


def run_on_simulated_ranks(
    function: Callable[..., Any],
    modules: Mapping[str, nn.Module],
    arguments: Sequence[Tensor],
    ranks: int,
    trains: bool = True,
    captured_at: Sequence[Tensor] | None = None,
    splits_few_rows: bool = False,
) -> Outcome:
    """Capture, shard and lower a job for `ranks` ranks, and run all of them; see `run_source_on_simulated_ranks`."""
    source = JobSource(name="job", function=function, modules=modules, trains=trains)
    return run_source_on_simulated_ranks(source, arguments, ranks, captured_at, splits_few_rows)


def run_source_on_simulated_ranks(
    source: JobSource,
    arguments: Sequence[Tensor],
    ranks: int,
    captured_at: Sequence[Tensor] | None = None,
    splits_few_rows: bool = False,
    probe: OperatorProbe | None = None,
) -> Outcome:
    """Capture, shard and lower a job for `ranks` ranks, and run all of them.

    With `captured_at`, the program is captured for those shapes, with symbols where the arguments' shapes differ. With
    `splits_few_rows`, fewer rows than ranks are split too, as those of a loader are, and some ranks have none. With
    `probe`, operators without a rule are probed.
    """
    sizes = SymbolicSizes()
    shapes, symbols = varying_shapes(sizes, arguments if captured_at is None else captured_at, arguments)
    program = capture(source, lambda tensors: (tuple(tensors), {}), shapes, DEVICE, sizes=sizes).program
    shardings = [(batch_placement(item.shape, ranks, splits_few_rows),) for item in shapes]
    sharded = propagate_shardings(program, shardings, [ranks], probe)
    graphs = [lower(sharded, mesh) for mesh in make_meshes([ranks])]
    if not compile_guards(sizes.guard_expressions(), len(symbols))(list(symbols.values())):
        raise GuardsFailed(sizes.guard_expressions())
    shardings = [(batch_placement(item.shape, ranks, splits_few_rows),) for item in arguments]
    inputs = collect_inputs(graphs, arguments, shardings, source.modules)
    values = interpret(graphs, inputs, symbols, [ranks])
    return make_outcome(sharded, graphs, values)


def run_on_simulated_axes(
    function: Callable[..., Any],
    modules: Mapping[str, nn.Module],
    arguments: Sequence[Tensor],
    axis_sizes: Sequence[int],
    shardings: Sequence[Callable[[Sequence[int]], Sharding]],
    trains: bool = True,
) -> Outcome:
    """Capture, shard and lower a job for a mesh of several axes, and run all of its workers.

    `shardings` has for each argument a function that returns its sharding, given a worker's ranks along the axes: where
    two axes divide one dim, the lengths of the inner one depend on the rank along the outer one.
    """
    source = JobSource(name="job", function=function, modules=modules, trains=trains)
    shapes, _ = varying_shapes(SymbolicSizes(), arguments, arguments)
    program = capture(source, lambda tensors: (tuple(tensors), {}), shapes, DEVICE).program
    return run_program_on_axes(program, arguments, modules, axis_sizes, shardings)


def run_program_on_axes(
    program: LogicalProgram,
    arguments: Sequence[Tensor],
    modules: Mapping[str, nn.Module],
    axis_sizes: Sequence[int],
    shardings: Sequence[Callable[[Sequence[int]], Sharding]],
    states: Mapping[str, Placement] | None = None,
) -> Outcome:
    """Shard and lower a program for a mesh of several axes, and run all of its workers.

    `states` has the placements of parameters along the last axis; the others are whole.
    """
    programs, graphs = [], []
    outer: Sharding = (Replicate(),) * (len(axis_sizes) - 1)
    known = {name: (*outer, read_stored(placement)) for name, placement in (states or {}).items()}
    for mesh in make_meshes(axis_sizes):
        ranks = [axis.rank for axis in mesh.axes]
        given = [sharding(ranks) for sharding in shardings]
        programs.append(propagate_shardings(program, given, axis_sizes, state_shardings=known))
        graphs.append(lower(programs[-1], mesh))
    places = list(product(*map(range, axis_sizes)))
    inputs = [
        collect_inputs([graph], arguments, [sharding(ranks) for sharding in shardings], modules, [ranks], states)[0]
        for ranks, graph in zip(places or [(rank,) for rank in range(len(graphs))], graphs, strict=True)
    ]
    return make_outcome(programs[0], graphs, interpret(graphs, inputs, {}, axis_sizes))


def divide_evenly(
    shape: Sequence[int], axis_sizes: Sequence[int], dims: Sequence[int | None]
) -> Callable[[Sequence[int]], Sharding]:
    """Return the sharding of a value by the ranks along the axes: each divides one dim, evenly if possible, or none."""

    def sharding(ranks: Sequence[int]) -> Sharding:
        sizes, found = list(shape), list[Placement]()
        for dim, rank, count in zip(dims, ranks, axis_sizes, strict=True):
            if dim is None:
                found.append(Replicate())
                continue
            lengths = split_lengths(sizes[dim], count)
            sizes[dim] = lengths[rank]
            found.append(Shard(dim, lengths))
        return tuple(found)

    return sharding


def make_meshes(axis_sizes: Sequence[int]) -> list[Mesh]:
    """Return the mesh of each simulated worker, in the order of ranks: the last axis is the innermost."""
    return [
        Mesh(
            rank=number,
            size=prod(axis_sizes),
            device=DEVICE,
            axes=tuple(
                MeshAxis(name=role, role=role, rank=rank, size=size)
                for role, rank, size in zip(ROLES, ranks, axis_sizes, strict=False)
            ),
        )
        for number, ranks in enumerate(product(*map(range, axis_sizes)))
    ]


class GuardsFailed(Exception):
    """The guards of a program do not hold for the arguments that it should run on."""


def varying_shapes(
    sizes: SymbolicSizes, captured_at: Sequence[Tensor], arguments: Sequence[Tensor]
) -> tuple[list[ArgumentShape], dict[str, int]]:
    """Return shapes with a symbol for each pair of sizes that differ, and the symbols' later values."""
    symbols: dict[tuple[int, int], Any] = {}
    shapes = []
    for before, after in zip(captured_at, arguments, strict=True):
        shape = []
        for pair in zip(before.shape, after.shape, strict=True):
            if pair[0] != pair[1] and pair not in symbols:
                symbols[pair] = sizes.create(pair[0], f"size {len(symbols)}")
            shape.append(symbols.get(pair, pair[0]))
        order = find_memory_order(before.shape, before.stride())
        shapes.append(ArgumentShape(shape=tuple(shape), dtype=before.dtype, order=order))
    return shapes, dict(zip(sizes.symbols, (after for _, after in symbols), strict=True))


def batch_placement(shape: Sequence[int], ranks: int, splits_few_rows: bool = False) -> Placement:
    """Return a shard of dim 0 if there are enough rows, or if few rows are split too."""
    if not shape or (shape[0] < ranks and not splits_few_rows):
        return Replicate()
    return Shard(0, split_lengths(shape[0], ranks))


def collect_inputs(
    graphs: Sequence[LocalGraph],
    arguments: Sequence[Tensor],
    shardings: Sequence[Sharding],
    modules: Mapping[str, nn.Module],
    places: Sequence[Sequence[int]] = (),
    states: Mapping[str, Placement] | None = None,
) -> list[list[Tensor]]:
    """Return every rank's inputs: its pieces of the arguments, constants, and the tensors of the modules."""
    tensors = named_tensors(modules)
    return [
        [
            take_parts(arguments[described.index], list_parts(shardings[described.index], ranks))
            if described.kind == "argument"
            else described.constant
            if described.constant is not None
            else take_state(tensors[described.name], (states or {}).get(described.name), ranks[-1])
            for _, described in graph.inputs
        ]
        for ranks, graph in zip(places or [(rank,) for rank in range(len(graphs))], graphs, strict=True)
    ]


def take_state(value: Tensor, placement: Placement | None, rank: int) -> Tensor:
    """Return a rank's piece of a parameter."""
    if not isinstance(placement, Shard | BlockedShard):
        return value
    return ShardLayout.of(value, placement).copy_shard(value.detach(), rank)


def join_shards(sharded: ShardedProgram, name: str, gathered: Sequence[Tensor]) -> list[Tensor]:
    """Return the whole gradient for every worker, given their pieces, if the last axis divides its parameter."""
    placement, ranks = sharded.find_state_sharding(name)[-1], sharded.axes[-1].ranks
    if isinstance(placement, OnRank):
        return [gathered[number - number % ranks + placement.rank] for number in range(len(gathered))]
    if not isinstance(placement, Shard | BlockedShard):
        return list(gathered)
    wholes = []
    for first in range(0, len(gathered), ranks):
        whole = torch.cat(list(gathered[first : first + ranks]), placement.dim)
        if isinstance(placement, BlockedShard):
            whole = join_blocks(whole, placement.dim, placement.lengths)
        wholes += [whole] * ranks
    return wholes


def make_outcome(
    sharded: ShardedProgram, graphs: Sequence[LocalGraph], values: Sequence[dict[fx.Node, Any]]
) -> Outcome:
    """Return the outputs of rank 0, which equal those of all ranks, with pending gradients summed."""
    results: list[Tensor] = []
    gradients, mutations, largest_terms = {}, {}, {}
    for index, (node, described) in enumerate(graphs[0].outputs):
        gathered = [known[graph.outputs[index][0]] for graph, known in zip(graphs, values, strict=True)]
        if described.kind == "gradient":
            gathered = join_shards(sharded, described.name, gathered)
        if node in graphs[0].pending_gradients:
            gathered = select_terms(gathered, [graph.outputs[index][0].meta["summed_along"] for graph in graphs])
            value = torch.stack(gathered).sum(0)
            finite = [item[torch.isfinite(item)].abs().max() for item in gathered if torch.isfinite(item).any()]
            largest_terms[described.name] = float(max(finite, default=0.0))
        else:
            value = gathered[0]
            for other in gathered[1:]:
                torch.testing.assert_close(other, value, rtol=0, atol=0, equal_nan=True)
        if described.kind == "gradient":
            gradients[described.name] = value
        elif described.kind == "mutation":
            mutations[described.name] = value
        elif described.kind == "result":
            results.append(value)
    return Outcome(results, gradients, mutations, sharded, graphs[0], largest_terms)


def select_terms(gathered: list[Tensor], axes: Sequence[Sequence[MeshAxis]]) -> list[Tensor]:
    """Return the terms of a sum along some axes; workers with the same rank along them have the same term."""
    found: dict[tuple[int, ...], Tensor] = {}
    for term, summed in zip(gathered, axes, strict=True):
        known = found.setdefault(tuple(axis.rank for axis in summed), term)
        torch.testing.assert_close(term, known, rtol=0, atol=0, equal_nan=True)
    return list(found.values())


def assert_same_as_plain(
    function: Callable[..., Any],
    modules: Mapping[str, nn.Module],
    arguments: Sequence[Tensor],
    ranks: int,
    bound: float = 1e-12,
    captured_at: Sequence[Tensor] | None = None,
    splits_few_rows: bool = False,
) -> Outcome:
    """Assert that loss, results, gradients, buffers and generator state equal the plain script's, within `bound`.

    The bound is relative to the loss, to a tensor's largest entry, or to the largest gradient of all.
    `run_on_simulated_ranks` explains `captured_at` and `splits_few_rows`.
    """
    return assert_runs_as_plain(
        lambda: run_on_simulated_ranks(
            function, modules, arguments, ranks, captured_at=captured_at, splits_few_rows=splits_few_rows
        ),
        function,
        modules,
        arguments,
        bound,
    )


def assert_runs_as_plain(
    run: Callable[[], Outcome],
    function: Callable[..., Any],
    modules: Mapping[str, nn.Module],
    arguments: Sequence[Tensor],
    bound: float = 1e-12,
) -> Outcome:
    """Assert the same of a run of a job on simulated workers."""
    before = {name: tensor.detach().clone() for name, tensor in named_tensors(modules).items()}
    state = get_random_state()
    found = run()
    state_after = get_random_state()
    for name, tensor in named_tensors(modules).items():
        assert torch.equal(tensor.detach(), before[name]), f"capture or run changed {name}"
    set_random_state(state)
    result = function(*arguments)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    loss = leaves[0] if leaves[0].dim() == 0 else leaves[0].mean()
    parameters = {name: item for module in modules.values() for name, item in named_tensors(modules).items()}
    wanted = {name: item for name, item in parameters.items() if item.requires_grad}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    assert torch.equal(get_random_state(), state_after), "the generator advanced differently"
    assert_near(found.results[0], loss.detach(), bound, "the loss")
    for position, leaf in enumerate(leaves):
        assert_near(found.results[position + 1], leaf.detach(), bound, f"result {position}")
    largest = max((float(grad.abs().max()) for grad in grads if grad is not None), default=0.0)
    by_identity = {id(wanted[name]): value for name, value in found.gradients.items()}
    by_tensor = {id(item): name for name, item in reversed(wanted.items())}
    for (name, item), grad in zip(wanted.items(), grads, strict=True):
        if grad is not None and by_tensor[id(item)] == name:
            assert_near(by_identity[id(item)], grad, bound, f"the gradient of {name}", floor=largest)
    after = named_tensors(modules)
    for name, value in found.mutations.items():
        # A running mean of values that have been normalized before is only rounding: their deviation is its scale.
        variance = after.get(name.removesuffix("running_mean") + "running_var")
        floor = 0.0 if variance is None else float(variance.detach().nan_to_num().max().sqrt())
        assert_near(value, after[name].detach(), bound, f"buffer {name}", floor)
    return found


def assert_near(found: Tensor, wanted: Tensor, bound: float, what: str, floor: float = 0.0) -> None:
    """Assert equal shapes and dtypes, values within `bound` of the largest entry, and NaN in the same places."""
    assert found.shape == wanted.shape, f"{what}: shape {list(found.shape)}, wanted {list(wanted.shape)}"
    assert found.dtype == wanted.dtype, f"{what}: {found.dtype}, wanted {wanted.dtype}"
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted), what
        return
    assert torch.equal(found.isnan(), wanted.isnan()), f"{what}: NaN in other places"
    if wanted.numel() == 0 or wanted.isnan().all():
        return
    scale = max(float(wanted.nan_to_num().abs().max()), floor, 1e-30)
    difference = float((found - wanted).nan_to_num().abs().max()) / scale
    assert difference <= bound, f"{what}: off by {difference:.3g}, allowed {bound}"
