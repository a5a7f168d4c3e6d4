"""Rules for fused scaled dot-product attention: sequences, heads and positions can be sharded, features cannot.

Note [divided positions]: if queries, keys or values are divided by positions, each rank gets all positions of some
heads, by an all-to-all, and the results are divided by positions again (Jacobs et al., "DeepSpeed Ulysses", 2023). If
there are fewer heads than ranks, and no causal mask, each rank keeps its queries, and gathers keys and values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rankless.compiler.rules.pattern import get_letter, make_placement, require_rows, split_strategies
from rankless.compiler.rules.strategy import OperatorCall, ShardingRule, Strategy, logical_shape
from rankless.parallel.tensor_placement import Partial, Placement, Replicate, Shard, split_lengths

aten = torch.ops.aten


def count_heads_per_key(call: OperatorCall) -> int:
    """Return how many query heads share a head of keys and values; zero if that is not a whole number."""
    heads, shared = count_heads(call, "query"), count_heads(call, "key")
    return heads // shared if shared and heads % shared == 0 else 0


def count_heads(call: OperatorCall, name: str) -> int:
    """Return the number of heads of an input."""
    names = [described.name for described in call.operator._schema.arguments if "Tensor" in str(described.type)]
    node = call.slots[names.index(name)]
    assert node is not None
    return logical_shape(node)[1]


def make_mask_pattern(call: OperatorCall, text: str) -> str:
    """Return the pattern of a mask or bias that broadcasts over batch or heads."""
    names = [described.name for described in call.operator._schema.arguments if "Tensor" in str(described.type)]
    name = "attn_mask" if "attn_mask" in names else "attn_bias" if "attn_bias" in names else None
    mask = call.slots[names.index(name)] if name is not None else None
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
    pattern = ",".join(inputs) + "->" + ",".join(outputs)
    undivided = "hks" if divides_queries(call) else "hksq"
    yield from split_strategies(call, pattern.translate(str.maketrans(undivided, "." * len(undivided))))
    yield from require_rows(partial(head_strategies, inputs=inputs, outputs=outputs))(call)


def divides_queries(call: OperatorCall) -> bool:
    """Return whether a kernel computes some queries as it computes all: it has no causal mask, and takes no lengths."""
    return call.operator in ON_ANY_QUERIES and not call.argument("is_causal")


def head_strategies(call: OperatorCall, inputs: list[str], outputs: list[str]) -> Iterator[Strategy]:
    """Yield the strategies that divide heads. PyTorch's kernels end the process if there are none.

    They divide heads as an input is divided, or evenly in place of positions; see Note [divided positions].
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
    if positions:
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


ON_ANY_QUERIES = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
"""Operators that take some queries as they take all; the others are given the number of positions."""
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
