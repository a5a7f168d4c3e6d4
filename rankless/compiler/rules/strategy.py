"""An operator call to shard, and one strategy to shard it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.ir.tensor_parts import Part
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import Placement, Replicate, Sharding, is_divided_along

AtenOperator = torch._ops.OpOverload
LocalValue = fx.Node | tuple[fx.Node | None, ...]
"""A value of the local program, or several if the operator has several outputs."""


class GraphBuilder(Protocol):
    """What a lowering rule may do: add operators and collectives to one rank's program.

    Several axes may divide a call by strategies with the same lowering. It then runs once, and its collectives run
    along all of them. Such a function depends on no placement of one axis. One made for a placement serves one axis.
    """

    @property
    def rank(self) -> int:
        """This process's rank along the axis whose strategy is being lowered."""
        ...

    @property
    def axis(self) -> MeshAxis:
        """That axis."""
        ...

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operator, or a Rankless function, on local values."""
        ...

    def input_sharding(self, index: int) -> Sharding:
        """Return the sharding in which the call that is being lowered takes an input, by its place in `call.inputs`."""
        ...

    def output_size(self, index: int) -> list[int]:
        """Return the local size of an output of the call that is being lowered."""
        ...

    def output_sharding(self, index: int) -> Sharding:
        """Return the sharding of that output."""
        ...

    def list_parts(self, sharding: Sharding) -> tuple[Part, ...]:
        """Return this rank's part of a value with a sharding, as ranges of dims; none if it is whole."""
        ...

    def all_reduce(self, value: fx.Node, reason: str, size: int) -> fx.Node:
        """Add a sum over the ranks of a value of `size` bytes."""
        ...

    def all_gather(self, value: fx.Node, reason: str, size: int) -> fx.Node:
        """Add an all-gather over the ranks of equal pieces, of `size` bytes each, along a new dim 0."""
        ...

    def ring_shift(self, value: fx.Node, index: int, hops: int, reason: str) -> fx.Node:
        """Begin to pass a piece on to the next rank along the axis, and to receive that of the rank before.

        Args:
            value: This rank's piece of an input of the call that is being lowered, or of a value in its shape.
            index: The input, by its place in `call.inputs`. The axis divides it.
            hops: How many times the pieces have been passed on before.
            reason: What the piece is.

        Returns:
            A `mesh_collectives.PendingShift`.
        """
        ...


LoweringRule = Callable[[GraphBuilder, "OperatorCall", tuple[Any, ...], dict[str, Any]], LocalValue]
"""Adds a call to one rank's program, given its arguments with local values in place of logical ones."""


@dataclass(frozen=True)
class Strategy:
    """One way to shard a call: the required placements of its tensor inputs, and the resulting ones of its outputs.

    Without `lower`, the same operator runs on the local values.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    lower: LoweringRule | None = None
    returned: tuple[Placement, ...] = ()
    """The placements in which later operators take the outputs, if a move for this operator alone is undone. The
    lengths of such a strategy are those of whole dims."""
    sent_bytes: int = 0
    """What `lower` sends in place of a redistribution of the inputs, by the measure of `redistribute.estimate_cost`."""
    joins_pieces: bool = False
    """Whether a rank's piece of an output depends on the pieces of other ranks, by collectives of `lower`."""


@dataclass(frozen=True)
class OperatorCall:
    """An operator in the logical program, and how one axis divides its inputs.

    `slots` are its tensor arguments in schema order. A rule knows nothing of other axes.
    """

    node: fx.Node
    operator: AtenOperator
    slots: tuple[fx.Node | None, ...]
    placements: Mapping[fx.Node, Placement]
    ranks: int
    """The number of ranks along the axis."""
    wanted: Placement | None = None
    """The placement in which the call's output is kept, if it is known: that of the parameter whose gradient it is."""
    inner: Callable[[], Sequence[Strategy]] = tuple
    """Returns the strategies that axes within this one would have for the call, if each was the only axis."""
    axis: int = 0
    """The number of the axis, after which its counts of selected rows are named."""

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The tensor arguments that are present."""
        return tuple(node for node in self.slots if node is not None)

    @property
    def current_placements(self) -> tuple[Placement, ...]:
        """The present placements of the inputs."""
        return tuple(self.placements[node] for node in self.inputs)

    def argument(self, name: str) -> Any:
        """Return a plain argument by its schema name, or its default."""
        for position, described in enumerate(self.operator._schema.arguments):
            if described.name == name:
                if position < len(self.node.args):
                    return self.node.args[position]
                return self.node.kwargs.get(name, described.default_value)
        raise KeyError(name)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The logical values of the outputs."""
        value = self.node.meta["val"]
        return tuple(value) if isinstance(value, tuple | list) else (value,)

    @property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The logical shape of every output; an empty shape for an absent one."""
        return tuple(tuple(item.shape) if isinstance(item, LogicalValue) else () for item in self.outputs)


ShardingRule = Callable[[OperatorCall], Iterator[Strategy]]


def get_operator(node: fx.Node) -> AtenOperator:
    """Return the operator that a node calls; only operators have strategies."""
    assert isinstance(node.target, AtenOperator), node.target
    return node.target


def make_call(
    node: fx.Node, placements: Mapping[fx.Node, Placement], ranks: int, wanted: Placement | None = None, axis: int = 0
) -> OperatorCall:
    """Return a node of the logical program as a call to shard or lower."""
    return OperatorCall(node, get_operator(node), list_tensor_slots(node), placements, ranks, wanted, axis=axis)


def find_local_range(builder: GraphBuilder, sharding: Sharding, dim: int, size: int) -> tuple[int, int]:
    """Return the first index and the length of this rank's part of a dim of a value, which has this logical size."""
    along = tuple(item if is_divided_along(item, dim) else Replicate() for item in sharding)
    for divided, start, length in builder.list_parts(along):
        if divided == dim:
            return start, length
    return 0, size


def logical_shape(node: fx.Node) -> tuple[int, ...]:
    """Return the logical shape of a value."""
    return tuple(node.meta["val"].shape)


def list_tensor_slots(node: fx.Node) -> tuple[fx.Node | None, ...]:
    """Return the tensor arguments of a call in schema order, lists flattened, absent ones None."""
    operator = get_operator(node)
    slots: list[fx.Node | None] = []
    for position, described in enumerate(operator._schema.arguments):
        if "Tensor" not in str(described.type):
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(described.name)
        if isinstance(value, list | tuple):
            slots.extend(item for item in value if isinstance(item, fx.Node))
        else:
            slots.append(value if isinstance(value, fx.Node) else None)
    return tuple(slots)


def make_replicated_strategy(call: OperatorCall) -> Strategy:
    """Return the strategy that is always correct: every value replicated."""
    return Strategy((Replicate(),) * len(call.inputs), (Replicate(),) * len(call.output_shapes))
