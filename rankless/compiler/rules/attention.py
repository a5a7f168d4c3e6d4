"""Rules for fused scaled dot-product attention: sequences and heads can be sharded, positions and features cannot."""

from collections.abc import Iterator
from typing import Any

import torch

from rankless.compiler.rules.pattern import split_strategies
from rankless.compiler.rules.strategy import OperatorCall, ShardingRule, Strategy, logical_shape

aten = torch.ops.aten


def make_attention_patterns(call: OperatorCall) -> tuple[str, str]:
    """Return the patterns of a (batch, heads, positions, features) tensor and of a row statistic.

    Heads can be sharded only if there are as many query heads as key and value heads.
    """
    names = [described.name for described in call.operator._schema.arguments if "Tensor" in str(described.type)]
    query, key = call.slots[names.index("query")], call.slots[names.index("key")]
    assert query is not None
    assert key is not None
    same_heads = logical_shape(query)[1] == logical_shape(key)[1]
    return ("bh..", "bh.") if same_heads else ("b...", "b..")


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


def attention_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of the forward; none with dropout, because the kernel draws for the rows it receives."""
    if call.argument("dropout_p"):
        return
    text, row = make_attention_patterns(call)
    inputs = [text, text, text] + [make_mask_pattern(call, text)] * (len(call.slots) - 3)
    outputs = [text, row] + ["="] * (len(call.output_shapes) - 2)
    yield from split_strategies(call, ",".join(inputs) + "->" + ",".join(outputs))


def attention_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of the gradients of queries, keys and values, and of a bias as a partial sum."""
    if call.argument("dropout_p"):
        return
    text, row = make_attention_patterns(call)
    by_name = {
        "out": text,
        "logsumexp": row,
        "attn_mask": make_mask_pattern(call, text),
        "attn_bias": make_mask_pattern(call, text),
    }
    inputs = []
    for described in call.operator._schema.arguments:
        if "Tensor" not in str(described.type):
            continue
        large = described.name.startswith("grad_out") or described.name in ("query", "key", "value")
        inputs.append(text if large else by_name.get(described.name, "*"))
    outputs = [text] * 3 + [make_mask_pattern(call, text) or "="] * (len(call.output_shapes) - 3)
    yield from split_strategies(call, ",".join(inputs) + "->" + ",".join(outputs))


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
