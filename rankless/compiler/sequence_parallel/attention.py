"""Rules for fused scaled dot-product attention: sequences, heads and positions can be sharded, features cannot.

Note [divided positions]: if queries, keys or values are divided by positions, each rank gets all positions of some
heads, by an all-to-all, and the results are divided by positions again (Jacobs et al., "DeepSpeed Ulysses", 2023). If
there are fewer heads than ranks, or an inner axis divides the heads, each rank keeps its queries, and keys and values
travel around the ring of ranks; see Note [ring attention].

Note [ring attention]: each rank computes with the block of keys and values that it has, while the block travels to the
next rank and that of the rank before arrives. After as many blocks as there are ranks it has seen all keys, and never
had more than three blocks. In the backward pass the blocks travel again, and their gradients behind them: the
rank after a block's own one begins a sum, each rank adds its term, and after the last one the sum is at home. All ranks
pass on all blocks, also those that a causal mask hides from them (Liu et al., "Ring Attention with Blockwise
Transformers", 2023).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx

from rankless.collectives.mesh_collectives import PendingShift
from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.rules.pattern import get_letter, make_placement, require_rows, split_strategies
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    LoweringRule,
    OperatorCall,
    ShardingRule,
    Strategy,
    find_local_range,
    logical_shape,
)
from rankless.compiler.sequence_parallel.attention_kernels import (
    AttentionBlock,
    attend_to_block,
    differentiate_block,
    finish_attention,
)
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.tensor_placement import (
    Partial,
    Placement,
    Replicate,
    Shard,
    is_divided_along,
    split_lengths,
)

aten = torch.ops.aten


def count_heads_per_key(call: OperatorCall) -> int:
    """Return how many query heads share a head of keys and values; zero if that is not a whole number."""
    heads, shared = count_heads(call, "query"), count_heads(call, "key")
    return heads // shared if shared and heads % shared == 0 else 0


def find_input(call: OperatorCall, *names: str) -> fx.Node | None:
    """Return the tensor argument with one of these names in the schema; None if there is none."""
    known = [described.name for described in call.operator._schema.arguments if "Tensor" in str(described.type)]
    return next((call.slots[known.index(name)] for name in names if name in known), None)


def count_heads(call: OperatorCall, name: str) -> int:
    """Return the number of heads of an input."""
    node = find_input(call, name)
    assert node is not None
    return logical_shape(node)[1]


def make_mask_pattern(call: OperatorCall, text: str) -> str:
    """Return the pattern of a mask or bias that broadcasts over batch or heads."""
    mask = find_input(call, "attn_mask", "attn_bias")
    if mask is None:
        return ""
    sizes = logical_shape(mask)
    aligned = text[len(text) - len(sizes) :]
    return "".join("." if size == 1 else letter for letter, size in zip(aligned, sizes, strict=True))


# Note [grouped heads]: `h` are the query heads and `k` the heads of keys and values. If each of the latter serves
# several query heads, a rank that has some of them has exactly the query heads that they serve.


def split_attention(call: OperatorCall, inputs: list[str], outputs: list[str]) -> Iterator[Strategy]:
    """Yield strategies of patterns that divide the batch `b`, the heads `h` and `k`, or the positions `q` of queries.

    The positions of keys and values are `s`. See Note [grouped heads] and Note [divided positions].
    """
    ring = find_ring(call, inputs, outputs)
    if ring is not None:
        yield ring  # it sends what the gather of keys and values sends, and takes less memory
    pattern = ",".join(inputs) + "->" + ",".join(outputs)
    undivided = "hks" if divides_queries(call) else "hksq"
    yield from split_strategies(call, pattern.translate(str.maketrans(undivided, "." * len(undivided))))
    exchanges = ring is None
    yield from require_rows(partial(head_strategies, inputs=inputs, outputs=outputs, exchanges=exchanges))(call)


def divides_queries(call: OperatorCall) -> bool:
    """Return whether a kernel computes some queries as it computes all: it has no causal mask, and takes no lengths."""
    return call.operator in ON_ANY_QUERIES and not call.argument("is_causal")


def head_strategies(
    call: OperatorCall, inputs: list[str], outputs: list[str], *, exchanges: bool
) -> Iterator[Strategy]:
    """Yield the strategies that divide heads. PyTorch's kernels end the process if there are none.

    They divide heads as an input is divided. With `exchanges`, they also divide heads evenly in place of positions; see
    Note [divided positions].
    """
    group = count_heads_per_key(call)
    present = [text for text, node in zip(inputs, call.slots, strict=True) if node is not None]
    found: list[Heads] = []
    positions: dict[str, tuple[int, ...]] = {}
    for text, placement in zip(present, call.current_placements, strict=True):
        letter = get_letter(text, placement.dim) if isinstance(placement, Shard) else None
        if not isinstance(placement, Shard) or letter not in ("h", "k", "q", "s") or not group:
            continue
        if letter in ("q", "s"):
            positions[letter] = placement.lengths
        elif letter == "k":
            found.append(Heads(tuple(item * group for item in placement.lengths), placement.lengths))
        elif all(isinstance(item, int) and item % group == 0 for item in placement.lengths):
            found.append(Heads(placement.lengths, tuple(item // group for item in placement.lengths)))
    if positions and exchanges:
        shared = split_lengths(count_heads(call, "key"), call.ranks)
        found.append(Heads(tuple(item * group for item in shared), shared))
    for heads in found:
        placed = tuple(heads.place(text, Partial()) for text in outputs)
        returned = tuple(
            Shard(2, positions[text[2]]) if len(text) == 4 and text[2] in positions else placement
            for text, placement in zip(outputs, placed, strict=True)
        )
        yield Strategy(
            tuple(heads.place(text, Replicate()) for text in present), placed, returned=returned if positions else ()
        )


def find_ring(call: OperatorCall, inputs: list[str], outputs: list[str]) -> Strategy | None:
    """Return the strategy that passes keys and values around a ring; None if another one suits; see the notes."""
    # The kernels of GPUs want masks aligned in memory, which a part of one is not.
    if call.operator not in IN_BLOCKS or find_input(call, "attn_bias") is not None:
        return None
    present = [text for text, node in zip(inputs, call.slots, strict=True) if node is not None]
    positions: dict[str, Shard] = {}
    for text, placement in zip(present, call.current_placements, strict=True):
        if isinstance(placement, Shard) and placement.dim == 2 and text[:3] in ("bhq", "bks"):
            positions.setdefault(text[2], placement)
    if len(positions) < 2:
        return None
    is_short_of_heads = count_heads(call, "key") < call.ranks
    if not is_short_of_heads and not any(is_divided_along(strategy.inputs[0], 1) for strategy in call.inner()):
        return None
    queries, keys = positions["q"], positions["s"]

    def place(text: str) -> Placement:
        if text.startswith("bks"):
            return keys
        return make_placement(text, "q", queries, Replicate())

    values = [node.meta["val"] for node in (find_input(call, "key"), find_input(call, "value")) if node is not None]
    size = sum(int(size_hint(value.numel()) * value.element_size()) for value in values)
    is_backward = outputs[1].startswith("bks")
    return Strategy(
        tuple(map(place, present)),
        tuple(map(place, outputs)),
        make_ring_lowering(keys.lengths, lower_ring_gradients if is_backward else lower_ring),
        sent_bytes=2 * size if is_backward else size,
        joins_pieces=True,
    )


@dataclass(frozen=True)
class Heads:
    """Every rank's number of query heads, and of heads of keys and values."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    def place(self, text: str, without: Placement) -> Placement:
        """Return the placement of a value with this pattern; `without` if it has no heads."""
        letter = "k" if "k" in text else "h"
        return make_placement(text, letter, Shard(0, self.keys if letter == "k" else self.queries), without)


def attention_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of the forward; none with dropout, because the kernel draws for the rows it receives."""
    if call.argument("dropout_p"):
        return
    inputs = ["bhq.", "bks.", "bks."] + [make_mask_pattern(call, "bhqs")] * (len(call.slots) - 3)
    outputs = ["bhq.", "bhq"] + ["="] * (len(call.output_shapes) - 2)
    yield from split_attention(call, inputs, outputs)


def attention_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of the gradients of queries, keys and values, and of a bias as a partial sum."""
    if call.argument("dropout_p"):
        return
    mask = make_mask_pattern(call, "bhqs")
    by_name = {
        "query": "bhq.",
        "key": "bks.",
        "value": "bks.",
        "out": "bhq.",
        "logsumexp": "bhq",
        "attn_mask": mask,
        "attn_bias": mask,
    }
    inputs = []
    for described in call.operator._schema.arguments:
        if "Tensor" in str(described.type):
            is_gradient = described.name.startswith("grad_out")
            inputs.append("bhq." if is_gradient else by_name.get(described.name, "*"))
    outputs = ["bhq.", "bks.", "bks."] + [mask or "="] * (len(call.output_shapes) - 3)
    yield from split_attention(call, inputs, outputs)


def make_ring_lowering(keys: tuple[int, ...], lower: Callable[["Ring"], LocalValue]) -> LoweringRule:
    """Return a lowering; one for each call, because a ring runs along one axis.

    Args:
        keys: The number of keys of each rank.
        lower: Adds the blocks, and returns the outputs.
    """

    def lower_call(
        builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LocalValue:
        schema = call.operator._schema.arguments
        given = {item.name: kwargs.get(item.name, item.default_value) for item in schema}
        given |= {item.name: value for item, value in zip(schema, args, strict=False)}
        return lower(Ring(builder, call, keys, given))

    return lower_call


@dataclass(frozen=True)
class Ring:
    """The blocks of a call of attention on one rank; see Note [ring attention].

    Args:
        builder: Adds to the rank's program.
        call: The call.
        keys: The number of keys of each rank.
        given: The rank's arguments by name.
    """

    builder: GraphBuilder
    call: OperatorCall
    keys: tuple[int, ...]
    given: dict[str, Any]

    @property
    def settings(self) -> AttentionBlock:
        """The kernel of a block."""
        return AttentionBlock(self.call.operator, self.given["scale"], bool(self.given["is_causal"]))

    def pass_on(self, name: str, value: fx.Node, hops: int, kind: str = "") -> fx.Node:
        """Begin to pass on a block of an input, or what has its shape."""
        node = find_input(self.call, name)
        assert node is not None
        return self.builder.ring_shift(value, self.call.inputs.index(node), hops, f"{kind}{name} around the ring")

    def list_blocks(self, *, own_last: bool = False) -> Iterator[tuple[tuple[int, int], tuple[fx.Node, ...]]]:
        """Yield the positions of this rank's first query and of a block's first key, and the block, for every block.

        This rank's own is the first one or the last one. While a block is used, the next one travels.
        """
        query = find_input(self.call, "query")
        assert query is not None
        sharding = self.builder.input_sharding(self.call.inputs.index(query))
        first, _ = find_local_range(self.builder, sharding, 2, logical_shape(query)[2])
        own = block = {name: self.given[name] for name in ("key", "value")}
        for hops in range(self.call.ranks):
            is_last = hops + 1 == self.call.ranks
            pending = {} if is_last else {name: self.pass_on(name, value, hops) for name, value in block.items()}
            if hops or not own_last:
                source = (self.builder.rank - hops) % self.call.ranks
                yield (first, sum(self.keys[:source])), tuple(block.values())
            block = {name: self.builder.call(PendingShift.wait, item) for name, item in pending.items()}
        if own_last:
            yield (first, sum(self.keys[: self.builder.rank])), tuple(own.values())


def lower_ring(ring: Ring) -> LocalValue:
    """Add the results of all blocks, and return the outputs of the call."""
    builder, values = ring.builder, ring.call.node.meta["val"]
    query, mask = ring.given["query"], ring.given.get("attn_mask")
    state = None
    for starts, block in ring.list_blocks():
        state = builder.call(attend_to_block, ring.settings, query, mask, block, starts, state)
    finished = builder.call(finish_attention, state, values[0].dtype)
    # The rest are states of generators, which nothing draws from.
    others = [
        builder.call(aten.new_zeros.default, query, list(value.shape), dtype=value.dtype)
        if isinstance(value, LogicalValue)
        else None
        for value in values[2:]
    ]
    return (builder.call(getitem, finished, 0), builder.call(getitem, finished, 1), *others)


def lower_ring_gradients(ring: Ring) -> LocalValue:
    """Add the gradients of all blocks, and return the outputs of the call."""
    builder, given = ring.builder, ring.given
    grad = given["grad_out"] if "grad_out" in given else given["grad_out_"]
    whole = (grad, given["query"], given["out"], given["logsumexp"], given.get("attn_mask"))
    used = {user.args[1] for user in ring.call.node.users}
    places = {name: place for name, place in (("key", 1), ("value", 2)) if place in used}
    grad_query, sums, pending = None, dict[str, fx.Node](), dict[str, fx.Node]()
    for hops, (starts, block) in enumerate(ring.list_blocks(own_last=True), start=1):
        found = builder.call(differentiate_block, ring.settings, whole, block, starts, grad_query)
        grad_query = builder.call(getitem, found, 0)
        sums = {name: builder.call(getitem, found, place) for name, place in places.items()}
        for name, item in pending.items():
            sums[name] = builder.call(aten.add_.Tensor, sums[name], builder.call(PendingShift.wait, item))
        if hops < ring.call.ranks:
            pending = {name: ring.pass_on(name, term, hops, "gradients of ") for name, term in sums.items()}
    grad_query = builder.call(aten.to.dtype, grad_query, ring.call.node.meta["val"][0].dtype)
    others = (None,) * (len(ring.call.output_shapes) - 3)
    return (grad_query, sums.get("key"), sums.get("value"), *others)


ON_ANY_QUERIES = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
"""Operators that take some queries as they take all; the others are given the number of positions."""
IN_BLOCKS = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
"""Operators that are computed block by block in a ring."""
RULES: dict[Any, ShardingRule] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention_strategies,
    aten._scaled_dot_product_flash_attention.default: attention_strategies,
    aten._scaled_dot_product_efficient_attention.default: attention_strategies,
    aten._scaled_dot_product_cudnn_attention.default: attention_strategies,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward_strategies,
    aten._scaled_dot_product_flash_attention_backward.default: attention_backward_strategies,
    aten._scaled_dot_product_efficient_attention_backward.default: attention_backward_strategies,
    aten._scaled_dot_product_cudnn_attention_backward.default: attention_backward_strategies,
}
