"""Rules for fused scaled dot-product attention: sequences and heads can be sharded, positions and features cannot."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rankless.compiler.rules.pattern import get_letter, make_placement, require_rows, split_strategies
from rankless.compiler.rules.strategy import OperatorCall, ShardingRule, Strategy, logical_shape
from rankless.parallel.tensor_placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten


def count_heads_per_key(call: OperatorCall) -> int:
    """Return how many query heads share a head of keys and values; zero if that is not a whole number."""
    names = [described.name for described in call.operator._schema.arguments if "Tensor" in str(described.type)]
    query, key = call.slots[names.index("query")], call.slots[names.index("key")]
    assert query is not None
    assert key is not None
    heads, shared = logical_shape(query)[1], logical_shape(key)[1]
    return heads // shared if shared and heads % shared == 0 else 0


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


def split_heads(call: OperatorCall, inputs: list[str], outputs: list[str]) -> Iterator[Strategy]:
    """Yield strategies of patterns that divide the batch `b`, or the heads `h` and `k`; see Note [grouped heads]."""
    pattern = ",".join(inputs) + "->" + ",".join(outputs)
    yield from split_strategies(call, pattern.replace("h", ".").replace("k", "."))
    yield from require_rows(partial(head_strategies, inputs=inputs, outputs=outputs))(call)


def head_strategies(call: OperatorCall, inputs: list[str], outputs: list[str]) -> Iterator[Strategy]:
    """Yield the strategies that divide heads. PyTorch's kernels end the process if there are none."""
    group = count_heads_per_key(call)
    present = [text for text, node in zip(inputs, call.slots, strict=True) if node is not None]
    for text, placement in zip(present, call.current_placements, strict=True):
        letter = get_letter(text, placement.dim) if isinstance(placement, Shard) else None
        if not isinstance(placement, Shard) or letter not in ("h", "k") or not group:
            continue
        if letter == "h" and any(not isinstance(item, int) or item % group for item in placement.lengths):
            continue
        shared = placement.lengths if letter == "k" else tuple(item // group for item in placement.lengths)
        heads = Heads(tuple(item * group for item in shared), shared)
        yield Strategy(
            tuple(heads.place(item, Replicate()) for item in present),
            tuple(heads.place(item, Partial()) for item in outputs),
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
    inputs = ["bh..", "bk..", "bk.."] + [make_mask_pattern(call, "bh..")] * (len(call.slots) - 3)
    outputs = ["bh..", "bh."] + ["="] * (len(call.output_shapes) - 2)
    yield from split_heads(call, inputs, outputs)


def attention_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of the gradients of queries, keys and values, and of a bias as a partial sum."""
    if call.argument("dropout_p"):
        return
    mask = make_mask_pattern(call, "bh..")
    by_name = {
        "query": "bh..",
        "key": "bk..",
        "value": "bk..",
        "out": "bh..",
        "logsumexp": "bh.",
        "attn_mask": mask,
        "attn_bias": mask,
    }
    inputs = []
    for described in call.operator._schema.arguments:
        if "Tensor" in str(described.type):
            is_gradient = described.name.startswith("grad_out")
            inputs.append("bh.." if is_gradient else by_name.get(described.name, "*"))
    outputs = ["bh..", "bk..", "bk.."] + [mask or "="] * (len(call.output_shapes) - 3)
    yield from split_heads(call, inputs, outputs)


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
