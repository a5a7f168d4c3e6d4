"""The order in which a rank runs the operators of a program whose experts are on single ranks.

Note [phases]: in the order of the script an expert gets its samples, computes, and gives its results back before the
next one begins. If each expert is on one rank, the others would wait for it all the time. So a program has phases: in
each all ranks first compute what they share, and send what experts need. Then every rank runs its own experts, without
any exchange. What needs a move of their results begins the next phase. Random operators and checks of values keep
their places among each other, and the backward pass begins after the forward pass.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem

from torch import fx

from rankless.compiler.expert_parallel import runs_everywhere
from rankless.compiler.rules.strategy import list_tensor_slots
from rankless.compiler.selected_rows.selections import is_reordered
from rankless.compiler.sharding.sharding_propagation import ShardedProgram
from rankless.parallel.tensor_placement import OnRank, Partial, Replicate, Shard, Sharding, is_divided_along

Move = tuple[fx.Node, fx.Node, Sharding]
"""An operator, one of its inputs, and the sharding in which it needs that."""
Place = tuple[int, bool]
"""The number of a phase, and whether a value depends on what single ranks compute in it."""


@dataclass(frozen=True)
class ProgramPhase:
    """Operators that run one after another, and the moves of their inputs that come before all of them.

    Attributes:
        nodes: The operators.
        moves: The moves.
    """

    nodes: tuple[fx.Node, ...]
    moves: tuple[Move, ...] = ()


def list_phases(sharded: ShardedProgram) -> list[ProgramPhase]:
    """Return the operators of a program in the order in which ranks run them; see Note [phases]."""
    logical = sharded.logical
    nodes = [node for node in logical.graph.nodes if node not in logical.inputs and node.op != "output"]
    if not any(is_on_one_rank(sharded.sharding(node)) for node in nodes):
        return [ProgramPhase(tuple(nodes))]
    places = find_places(sharded, nodes)
    phases = []
    for place, members in itertools.groupby(sorted(nodes, key=places.__getitem__), key=places.__getitem__):
        group = tuple(members)
        phases.append(ProgramPhase(group, tuple(list_moves(sharded, group, places)) if place[1] else ()))
    return phases


def find_places(sharded: ShardedProgram, nodes: list[fx.Node]) -> dict[fx.Node, Place]:
    """Return the place of each operator, which is never before those of its inputs."""
    places: dict[fx.Node, Place] = dict.fromkeys(sharded.logical.inputs, (0, False))
    checked = {node for node, output in sharded.logical.outputs if output.kind == "check"}
    earliest, last, last_draw, is_forward = (0, False), (0, False), (0, False), True
    for node in nodes:
        if is_forward and node.meta.get("backward"):
            earliest, is_forward = last, False
        place = max([earliest, *(follow(sharded, node, value, places) for value in node.all_input_nodes)])
        if is_on_one_rank(sharded.sharding(node)):
            place = place[0], True
        if runs_everywhere(node):
            place = last_draw = max(place, last_draw)
        if node in checked:
            earliest = max(earliest, place)
        last = max(last, place)
        places[node] = place
    return places


def follow(sharded: ShardedProgram, node: fx.Node, value: fx.Node, places: Mapping[fx.Node, Place]) -> Place:
    """Return the place of an operator that follows from one of its inputs."""
    phase, depends = places[value]
    if node.target is getitem or not depends:
        return phase, depends
    given = sharded.sharding(value)
    moves = any(needs_exchange(given, required) for item, required in list_required(sharded, node) if item is value)
    return (phase + 1, False) if moves else (phase, True)


def list_required(sharded: ShardedProgram, node: fx.Node) -> Iterator[tuple[fx.Node, Sharding]]:
    """Yield the inputs of an operator, and the shardings in which it takes them."""
    inputs = [value for value in list_tensor_slots(node) if value is not None]
    yield from zip(inputs, sharded.input_shardings(node), strict=True)


def list_moves(sharded: ShardedProgram, nodes: tuple[fx.Node, ...], places: Mapping[fx.Node, Place]) -> Iterator[Move]:
    """Yield the moves that operators on single ranks need before they run.

    What several ranks need is moved to all of them at once.
    """
    found: dict[fx.Node, list[tuple[fx.Node, Sharding]]] = {}
    for node in nodes:
        if node.target is getitem:
            continue
        for value, required in list_required(sharded, node):
            if places[value] != places[node] and needs_exchange(sharded.sharding(value), required):
                found.setdefault(value, []).append((node, required))
    for value, wanted in found.items():
        for node, required in wanted:
            others = [
                tuple(Replicate() if one != other else one for one, other in zip(required, item, strict=True))
                for _, item in wanted
                if item != required
            ]
            yield node, value, others[0] if others else required


def needs_exchange(given: Sharding, required: Sharding) -> bool:
    """Return whether ranks exchange values to get from one sharding to another."""
    return any(
        before != after
        and not isinstance(before, Replicate)
        and not (isinstance(before, OnRank) and isinstance(after, Partial))
        for before, after in zip(given, required, strict=True)
    )


def is_on_one_rank(sharding: Sharding) -> bool:
    """Return whether one rank along some axis has a value."""
    return any(isinstance(placement, OnRank) for placement in sharding)


@dataclass(frozen=True, kw_only=True)
class JointMove:
    """Values that an axis divides, each of which goes to one rank.

    Attributes:
        number: The number of the axis.
        parts: The placement of each value along it: its dim, and the lengths of the pieces.
        ranks: The rank to which each value goes.
        moves: The moves.
    """

    number: int
    parts: tuple[Shard, ...]
    ranks: tuple[int, ...]
    moves: tuple[Move, ...]


def join_moves(moves: Sequence[Move], sharded: ShardedProgram, find_stage: Callable[[fx.Node], int]) -> list[JointMove]:
    """Return the moves that can be made together, in groups of at least two.

    Args:
        moves: The moves before a phase.
        sharded: The program.
        find_stage: Returns the stage of an operator in a pipeline. Moves from and to one stage are made together.
    """
    groups: dict[tuple[object, ...], dict[tuple[fx.Node, int], tuple[Move, Shard, OnRank]]] = {}
    for move in moves:
        node, value, target = move
        given, logical = sharded.sharding(value), value.meta["val"]
        changed = [number for number, pair in enumerate(zip(given, target, strict=True)) if pair[0] != pair[1]]
        if len(changed) != 1:
            continue
        (number,) = changed
        before, after = given[number], target[number]
        if not isinstance(before, Shard) or not isinstance(after, OnRank) or is_reordered([before]):
            continue
        if any(is_divided_along(inner, before.dim) for inner in given[number + 1 :]):
            continue
        owners = tuple(item if isinstance(item, OnRank) else None for item in given)
        key = number, owners, logical.dtype, logical.device, find_stage(node), find_stage(value)
        groups.setdefault(key, {}).setdefault((value, after.rank), (move, before, after))
    return [
        JointMove(
            number=int(str(key[0])),
            parts=tuple(before for _, before, _ in group.values()),
            ranks=tuple(after.rank for _, _, after in group.values()),
            moves=tuple(move for move, _, _ in group.values()),
        )
        for key, group in groups.items()
        if len(group) > 1
    ]
