"""Moves to single ranks that one all-to-all makes together: the experts of all ranks get their samples at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from rankless.compiler.lowering.phases import Move
from rankless.compiler.sharding.sharding_propagation import ShardedProgram
from rankless.compiler.tracing.row_selections import is_reordered
from rankless.parallel.tensor_placement import OnRank, Shard, is_divided_along


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
