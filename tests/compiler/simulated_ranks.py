"""Simulate N ranks in one process to test capture, sharding and lowering: all programs run node by node in lockstep.

Collectives are computed from the list of all ranks' values. Random operators start from the same generator state on
every rank, as in real processes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from rankless.compiler.capture.capture import ArgumentShape, JobSource, capture
from rankless.compiler.capture.graph_cleanup import named_tensors
from rankless.compiler.ir.local_kernels import DrawFrom, reduce_extremum
from rankless.compiler.ir.memory_order import find_memory_order
from rankless.compiler.lowering.lower import LocalGraph, lower
from rankless.compiler.sharding.redistribute import Redistribution, StackingAllGather
from rankless.compiler.sharding.sharding_propagation import ShardedProgram, propagate_shardings
from rankless.compiler.tracing.symbolic_sizes import SymbolicSizes, compile_guards, evaluate_size
from rankless.context.generator_states import restore_generators, save_generators
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Placement, Replicate, Shard, split_lengths


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
) -> Outcome:
    """Capture, shard and lower a job for `ranks` ranks, and run all of them.

    With `captured_at`, the program is captured for those shapes, with symbols where the arguments' shapes differ. With
    `splits_few_rows`, fewer rows than ranks are split too, as those of a loader are, and some ranks have none.
    """
    sizes = SymbolicSizes()
    shapes, symbols = varying_shapes(sizes, arguments if captured_at is None else captured_at, arguments)
    program = capture(source, lambda tensors: (tuple(tensors), {}), shapes, torch.device("cpu"), sizes=sizes).program
    sharded = propagate_shardings(
        program, tuple(batch_placement(item.shape, ranks, splits_few_rows) for item in shapes), ranks
    )
    meshes = [Mesh(rank=rank, size=ranks, device=torch.device("cpu")) for rank in range(ranks)]
    graphs = [lower(sharded, mesh) for mesh in meshes]
    if not compile_guards(sizes.guard_expressions(), len(symbols))(list(symbols.values())):
        raise GuardsFailed(sizes.guard_expressions())
    placements = [batch_placement(item.shape, ranks, splits_few_rows) for item in arguments]
    inputs = collect_inputs(graphs, arguments, placements, source.modules)
    values = interpret(graphs, inputs, symbols)
    return make_outcome(sharded, graphs, values)


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


def slice_for_rank(value: Tensor, placement: Placement, rank: int) -> Tensor:
    """Return one rank's piece."""
    if not isinstance(placement, Shard):
        return value
    return value.narrow(placement.dim, placement.start(rank), placement.lengths[rank]).clone()


def collect_inputs(
    graphs: Sequence[LocalGraph],
    arguments: Sequence[Tensor],
    placements: Sequence[Placement],
    modules: Mapping[str, nn.Module],
) -> list[list[Tensor]]:
    """Return every rank's inputs: its pieces of the arguments, constants, and the tensors of the modules."""
    tensors = named_tensors(modules)
    return [
        [
            slice_for_rank(arguments[described.index], placements[described.index], rank)
            if described.kind == "argument"
            else described.constant
            if described.constant is not None
            else tensors[described.name]
            for _, described in graph.inputs
        ]
        for rank, graph in enumerate(graphs)
    ]


def interpret(
    graphs: Sequence[LocalGraph], inputs: Sequence[Sequence[Tensor]], symbols: Mapping[str, int]
) -> list[dict[fx.Node, Any]]:
    """Run all ranks' graphs, the i-th node of each before the next."""
    values: list[dict[fx.Node, Any]] = [
        {node: value.detach() for (node, _), value in zip(graph.inputs, given, strict=True)}
        for graph, given in zip(graphs, inputs, strict=True)
    ]
    for nodes in zip(*(graph.graph.nodes for graph in graphs), strict=True):
        if nodes[0].op in ("placeholder", "output"):
            continue
        arguments = [
            fx.node.map_aggregate(
                (node.args, node.kwargs),
                lambda item, known=known: known[item] if isinstance(item, fx.Node) else evaluate_size(item, symbols),
            )
            for node, known in zip(nodes, values, strict=True)
        ]
        if isinstance(nodes[0].target, Redistribution | StackingAllGather):
            pieces, lengths = [args[0] for args, _ in arguments], arguments[0][0][1:]
            results = [call_collective(node.target, pieces, lengths, rank) for rank, node in enumerate(nodes)]
        else:
            own = nodes[0].target.generator if isinstance(nodes[0].target, DrawFrom) else None
            states = save_generators([] if own is None else [own])
            results = []
            with torch.no_grad():
                for node, (args, kwargs) in zip(nodes, arguments, strict=True):
                    restore_generators(states)
                    results.append(node.target(*args, **kwargs))
        for node, known, result in zip(nodes, values, results, strict=True):
            known[node] = result
            if isinstance(result, Tensor) and "logical" in node.meta:
                check_layout(node, result)
    return values


OWN_LAYOUT = (
    "_native_batch_norm_legit",
    "native_batch_norm_backward",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
)
"""Operators of PyTorch whose kernels lay out results in another way than a trace says, on one device too."""


def check_layout(node: fx.Node, value: Tensor) -> None:
    """Assert that a value that a rank has whole lies in memory as the logical value does.

    A piece may lie otherwise, as that of an expanded value does: random operators draw in the logical value's order.
    """
    logical = node.meta["logical"]
    shape, strides = logical.meta["val"].shape, logical.meta["val"].strides
    overlaps = any(size != 1 and stride == 0 for size, stride in zip(shape, strides, strict=True))
    if overlaps or 0 in value.shape or tuple(value.shape) != tuple(shape):
        return
    order = sorted(range(len(shape)), key=strides.__getitem__, reverse=True)
    found = [value.stride(dim) for dim in order if shape[dim] != 1]
    if found == sorted(found, reverse=True):
        return
    producers = f"{logical.target} {[item.target for item in logical.all_input_nodes]}"
    logical.meta["own layout"] = any(name in producers for name in OWN_LAYOUT) or follows_own_layout(logical)
    assert logical.meta["own layout"], f"{logical.target}: {value.stride()}, traced {shape}, {strides}"


def follows_own_layout(logical: fx.Node) -> bool:
    """Return whether a value is computed from one that an operator has laid out in its own way."""
    waiting, seen = list(logical.all_input_nodes), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node.meta.get("own layout"):
            return True
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return False


def call_collective(
    collective: Redistribution | StackingAllGather, pieces: list[Tensor], lengths: Sequence[tuple[int, ...]], rank: int
) -> Tensor:
    """Return what a collective gives to one rank."""
    if isinstance(collective, StackingAllGather):
        return torch.stack(pieces)
    source, target = collective.source, collective.target
    if isinstance(source, Shard):
        assert [piece.shape[source.dim] for piece in pieces] == list(lengths[0])
        whole = torch.cat(pieces, dim=source.dim)
    elif source.reduce_op == "sum":
        whole = torch.stack(pieces).sum(0).to(pieces[0].dtype)
    else:
        whole = reduce_extremum(torch.stack(pieces), source.reduce_op)
    return slice_for_rank(whole, Shard(target.dim, lengths[-1]) if isinstance(target, Shard) else target, rank)


def make_outcome(
    sharded: ShardedProgram, graphs: Sequence[LocalGraph], values: Sequence[dict[fx.Node, Any]]
) -> Outcome:
    """Return the outputs of rank 0, which equal those of all ranks, with pending gradients summed."""
    results: list[Tensor] = []
    gradients, mutations, largest_terms = {}, {}, {}
    for index, (node, described) in enumerate(graphs[0].outputs):
        gathered = [known[graph.outputs[index][0]] for graph, known in zip(graphs, values, strict=True)]
        if node in graphs[0].pending_gradients:
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
    before = {name: tensor.detach().clone() for name, tensor in named_tensors(modules).items()}
    state = torch.get_rng_state()
    found = run_on_simulated_ranks(
        function, modules, arguments, ranks, captured_at=captured_at, splits_few_rows=splits_few_rows
    )
    state_after = torch.get_rng_state()
    for name, tensor in named_tensors(modules).items():
        assert torch.equal(tensor.detach(), before[name]), f"capture or run changed {name}"
    torch.set_rng_state(state)
    result = function(*arguments)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    loss = leaves[0] if leaves[0].dim() == 0 else leaves[0].mean()
    parameters = {name: item for module in modules.values() for name, item in named_tensors(modules).items()}
    wanted = {name: item for name, item in parameters.items() if item.requires_grad}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    assert torch.equal(torch.get_rng_state(), state_after), "the generator advanced differently"
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
