"""Rules as patterns of letters, in the manner of einsum.

Note [patterns]: "mk,kn->mn" says that a product of matrices may be split on m, on k or on n. A letter is a dim that the
operator may be split on; "." is a dim that must stay whole; "*" stands for all dims that follow, whole. An output
without the letter is then a partial sum: split on k, each rank has one term of "mn". A letter is only tried where
an input already lies split on it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rankless.compiler.rules.strategy import LoweringRule, OperatorCall, ShardingRule, Strategy
from rankless.parallel.placement import Partial, Placement, Replicate, Shard

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def split_strategies(call: OperatorCall, pattern: str, lower: LoweringRule | None = None) -> Iterator[Strategy]:
    """The strategies of a pattern for the tensor arguments of a call (commas keep a place for absent ones)."""
    left, right = pattern.replace(" ", "").split("->")
    given = left.split(",")
    wanted = [text for text, node in zip(given, call.slots, strict=True) if node is not None]
    outputs = right.split(",")
    tried: list[tuple[str, tuple[int, ...]]] = []  # varying lengths have no hash
    for text, placement in zip(wanted, call.current_placements, strict=True):
        if not isinstance(placement, Shard):
            continue
        letter = get_letter(text, placement.dim)
        if letter is None or (letter, placement.lengths) in tried:
            continue
        tried.append((letter, placement.lengths))
        yield Strategy(
            tuple(make_placement(item, letter, placement.lengths, Replicate()) for item in wanted),
            tuple(make_placement(item, letter, placement.lengths, Partial()) for item in outputs),
            lower,
        )


def get_letter(text: str, dim: int) -> str | None:
    """The letter of a dim, or None if that dim must stay whole."""
    if dim < len(text) and text[dim] not in ".*":
        return text[dim]
    return None


def make_placement(text: str, letter: str, lengths: tuple[int, ...], without: Placement) -> Placement:
    """A value's placement when `letter` is split; `without` if the value does not have that letter."""
    if letter in text:
        return Shard(text.index(letter), lengths)
    return Replicate() if text.startswith("=") else without


def partial_sum_strategies(
    call: OperatorCall, *groups: Sequence[int], lower: LoweringRule | None = None
) -> Iterator[Strategy]:
    """Strategies of an operator linear in groups of inputs: partial sums in give partial sums out.

    Each group holds positions in `call.inputs`; the inputs outside the group must be whole. A whole input inside a
    group is turned into a partial sum, held by rank 0 alone.
    """
    for group in groups:
        if any(is_partial_sum(call.current_placements[position]) for position in group):
            yield Strategy(
                tuple(Partial() if position in group else Replicate() for position in range(len(call.inputs))),
                (Partial(),) * len(call.output_shapes),
                lower,
            )


def is_partial_sum(placement: Placement) -> bool:
    """Whether a value is a partial sum (and not a partial maximum)."""
    return isinstance(placement, Partial) and placement.reduce_op == "sum"


def make_pattern_rule(
    pattern: str | Callable[[OperatorCall], str], *groups: Sequence[int], lower: LoweringRule | None = None
) -> ShardingRule:
    """A rule from a pattern, fixed or made from the call's shapes, linear in the given groups of inputs."""

    def rule(call: OperatorCall) -> Iterator[Strategy]:
        text = pattern if isinstance(pattern, str) else pattern(call)
        yield from split_strategies(call, text, lower)
        yield from partial_sum_strategies(call, *groups, lower=lower)

    return rule


def make_masked_rule(pattern: Callable[[OperatorCall], str], lower: LoweringRule | None = None) -> ShardingRule:
    """A rule for an operator whose `output_mask` switches outputs off."""

    def rule(call: OperatorCall) -> Iterator[Strategy]:
        wanted = call.argument("output_mask")
        for strategy in split_strategies(call, pattern(call), lower):
            outputs = tuple(
                placement if there else Replicate() for placement, there in zip(strategy.outputs, wanted, strict=True)
            )
            yield replace(strategy, outputs=outputs)

    return rule


def make_letters(count: int, whole: Sequence[int] = ()) -> str:
    """`count` letters, with "." on the dims in `whole` (negative ones count from the end)."""
    kept = {dim % count for dim in whole} if count else set()
    return "".join("." if dim in kept else LETTERS[dim] for dim in range(count))
