"""Fused scaled dot-product attention: sequences and heads may be split, positions and features stay whole."""

from collections.abc import Iterator
from typing import Any

import torch

from rankless.compiler.rules.pattern import split
from rankless.compiler.rules.strategy import Call, Rule, Strategy, shape_of

aten = torch.ops.aten


def letters_for(call: Call) -> tuple[str, str]:
    """Patterns of a (batch, heads, positions, features) tensor and of a row statistic.

    Heads are free only if queries have as many as keys and values.
    """
    names = [described.name for described in call.operator._schema.arguments if "Tensor" in str(described.type)]
    query, key = call.slots[names.index("query")], call.slots[names.index("key")]
    assert query is not None
    assert key is not None
    same_heads = shape_of(query)[1] == shape_of(key)[1]
    return ("bh..", "bh.") if same_heads else ("b...", "b..")


def mask_text(call: Call, text: str) -> str:
    """The pattern of a mask or bias that is stretched over batch or heads."""
    names = [described.name for described in call.operator._schema.arguments if "Tensor" in str(described.type)]
    name = "attn_mask" if "attn_mask" in names else "attn_bias" if "attn_bias" in names else None
    mask = call.slots[names.index(name)] if name is not None else None
    if mask is None:
        return ""
    sizes = shape_of(mask)
    aligned = text[len(text) - len(sizes) :]
    return "".join("." if size == 1 else letter for letter, size in zip(aligned, sizes, strict=True))


def forward(call: Call) -> Iterator[Strategy]:
    """With dropout the kernel draws for the rows it is given, so it is left to be gathered."""
    if call.argument("dropout_p"):
        return
    text, row = letters_for(call)
    inputs = [text, text, text] + [mask_text(call, text)] * (len(call.slots) - 3)
    outputs = [text, row] + ["="] * (len(call.output_shapes) - 2)
    yield from split(call, ",".join(inputs) + "->" + ",".join(outputs))


def backward(call: Call) -> Iterator[Strategy]:
    """Gradients of queries, keys and values (and of a bias, which is then a partial sum)."""
    if call.argument("dropout_p"):
        return
    text, row = letters_for(call)
    by_name = {
        "out": text,
        "logsumexp": row,
        "attn_mask": mask_text(call, text),
        "attn_bias": mask_text(call, text),
    }
    inputs = []
    for described in call.operator._schema.arguments:
        if "Tensor" not in str(described.type):
            continue
        large = described.name.startswith("grad_out") or described.name in ("query", "key", "value")
        inputs.append(text if large else by_name.get(described.name, "*"))
    outputs = [text] * 3 + [mask_text(call, text) or "="] * (len(call.output_shapes) - 3)
    yield from split(call, ",".join(inputs) + "->" + ",".join(outputs))


RULES: dict[Any, Rule] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: forward,
    aten._scaled_dot_product_flash_attention.default: forward,
    aten._scaled_dot_product_efficient_attention.default: forward,
    aten._scaled_dot_product_cudnn_attention.default: forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: backward,
    aten._scaled_dot_product_flash_attention_backward.default: backward,
    aten._scaled_dot_product_efficient_attention_backward.default: backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: backward,
}
