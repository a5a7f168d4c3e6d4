"""Rules as patterns of letters, in the style of einsum.

Note [patterns]: "mk,kn->mn" says that a matrix product can be sharded on m, on k or on n. A letter is a dim that can be
sharded, "." is a dim that must be replicated, and "*" stands for all remaining dims, replicated. An output that lacks
the letter is a partial sum: sharded on k, each rank holds one term of "mn". A rule only tries a letter on which an
input is already sharded. Indices of a letter are independent of each other, so it may also be sharded in blocks
(`tensor_placement`, Note [dims of several blocks]), unless a lowering needs the range of rows that a rank has.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rankless.compiler.rules.strategy import LoweringRule, OperatorCall, ShardingRule, Strategy
from rankless.parallel.tensor_placement import BlockedShard, Partial, Placement, Replicate, Shard, is_divided_along

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def split_strategies(call: OperatorCall, pattern: str, lower: LoweringRule | None = None) -> Iterator[Strategy]:
    """Yield a pattern's strategies for the tensor arguments of a call; commas keep a place for absent arguments."""
    left, right = pattern.replace(" ", "").split("->")
    input_texts = left.split(",")
    inputs = [text for text, node in zip(input_texts, call.slots, strict=True) if node is not None]
    outputs = right.split(",")
    tried: list[tuple[str, type[Placement], tuple[int, ...]]] = []  # symbolic lengths are not hashable
    for text, placement in zip(inputs, call.current_placements, strict=True):
        if not isinstance(placement, Shard) and not (isinstance(placement, BlockedShard) and lower is None):
            continue
        letter = get_letter(text, placement.dim)
        key = letter or "", type(placement), placement.lengths
        if letter is None or key in tried:
            continue
        tried.append(key)
        yield Strategy(
            tuple(make_placement(item, letter, placement, Replicate()) for item in inputs),
            tuple(make_placement(item, letter, placement, Partial()) for item in outputs),
            lower,
        )


def require_rows(rule: ShardingRule, dim: int | None = None) -> ShardingRule:
    """Return a rule that splits only if every rank has rows: some kernels raise, or end the process, without.

    Lengths that vary from call to call may become zero, so they are not split either.

    Args:
        rule: The rule.
        dim: Only strategies that split this dim of the first input need rows. None for all strategies.
    """

    def strategies(call: OperatorCall) -> Iterator[Strategy]:
        for strategy in rule(call):
            first = strategy.inputs[0] if strategy.inputs else Replicate()
            is_concerned = dim is None or is_divided_along(first, dim)
            if not is_concerned or all(map(has_rows, (*strategy.inputs, *strategy.outputs))):
                yield strategy

    return strategies


def has_rows(placement: Placement) -> bool:
    """Return whether every rank has a part of a value for sure."""
    if not isinstance(placement, Shard | BlockedShard):
        return True
    return all(isinstance(item, int) and item > 0 for item in placement.lengths)


def get_letter(text: str, dim: int) -> str | None:
    """Return the letter of a dim, or None if that dim must be replicated."""
    if dim < len(text) and text[dim] not in ".*":
        return text[dim]
    return None


def make_placement(text: str, letter: str, like: Shard | BlockedShard, without: Placement) -> Placement:
    """Return a value's placement when `letter` is sharded as in another value.

    Args:
        text: The letters of the value's dims.
        letter: The letter.
        like: How another value is sharded on it.
        without: What is returned if the value lacks the letter.
    """
    if letter in text:
        return move_shard(like, text.index(letter), like.lengths)
    return Replicate() if text.startswith("=") else without


def move_shard(like: Shard | BlockedShard, dim: int, lengths: tuple[int, ...]) -> Shard | BlockedShard:
    """Return a placement of the same kind on another dim."""
    return Shard(dim, lengths) if isinstance(like, Shard) else BlockedShard(dim, lengths)


def partial_sum_strategies(
    call: OperatorCall, *groups: Sequence[int], lower: LoweringRule | None = None
) -> Iterator[Strategy]:
    """Yield strategies of an operator that is linear in groups of inputs: partial sums in give partial sums out.

    Each group holds positions in `call.inputs`; the inputs outside the group must be replicated. A replicated input
    inside a group becomes a partial sum that rank 0 alone holds.
    """
    for group in groups:
        if any(is_partial_sum(call.current_placements[position]) for position in group):
            yield Strategy(
                tuple(Partial() if position in group else Replicate() for position in range(len(call.inputs))),
                (Partial(),) * len(call.output_shapes),
                lower,
            )


def is_partial_sum(placement: Placement) -> bool:
    """Return whether a value is a partial sum, as opposed to a partial maximum."""
    return isinstance(placement, Partial) and placement.reduce_op == "sum"


def make_pattern_rule(
    pattern: str | Callable[[OperatorCall], str], *groups: Sequence[int], lower: LoweringRule | None = None
) -> ShardingRule:
    """Return a rule from a pattern, fixed or made from the call's shapes, linear in the given groups of inputs."""

    def rule(call: OperatorCall) -> Iterator[Strategy]:
        text = pattern if isinstance(pattern, str) else pattern(call)
        yield from split_strategies(call, text, lower)
        yield from partial_sum_strategies(call, *groups, lower=lower)

    return rule


def make_masked_rule(pattern: Callable[[OperatorCall], str], lower: LoweringRule | None = None) -> ShardingRule:
    """Return a rule for an operator whose `output_mask` disables outputs."""

    def rule(call: OperatorCall) -> Iterator[Strategy]:
        output_mask = call.argument("output_mask")
        for strategy in split_strategies(call, pattern(call), lower):
            outputs = tuple(
                placement if is_present else Replicate()
                for placement, is_present in zip(strategy.outputs, output_mask, strict=True)
            )
            yield replace(strategy, outputs=outputs)

    return rule


def make_letters(count: int, replicated_dims: Sequence[int] = ()) -> str:
    """Return `count` letters, with "." on replicated dims (negative ones count from the end)."""
    kept = {dim % count for dim in replicated_dims} if count else set()
    return "".join("." if dim in kept else LETTERS[dim] for dim in range(count))
