"""Pooling and padding of images: the last dims stay whole, batch and channels may be split.

Resizing is captured as reading by index.
"""

from typing import Any

import torch

from rankless.compiler.rules.pattern import by_pattern, letters
from rankless.compiler.rules.strategy import Call, Rule, shape_of

aten = torch.ops.aten


def spatial(dims: int) -> Any:
    """A pattern with the last `dims` dims whole in every tensor."""

    def pattern(call: Call) -> str:
        whole = range(-dims, 0)
        texts = [letters(len(shape_of(node)), whole) if node is not None else "" for node in call.slots]
        outputs = [letters(len(shape), whole) for shape in call.output_shapes]
        return ",".join(texts) + "->" + ",".join(outputs)

    return pattern


RULES: dict[Any, Rule] = {
    **{
        operator: by_pattern(spatial(2))
        for operator in (
            aten.max_pool2d_with_indices.default,
            aten.max_pool2d_with_indices_backward.default,
            aten.avg_pool2d.default,
            aten.avg_pool2d_backward.default,
            aten._adaptive_avg_pool2d.default,
            aten._adaptive_avg_pool2d_backward.default,
            aten.adaptive_max_pool2d.default,
            aten.adaptive_max_pool2d_backward.default,
            aten.reflection_pad2d.default,
            aten.reflection_pad2d_backward.default,
            aten.replication_pad2d.default,
            aten.replication_pad2d_backward.default,
        )
    },
    **{
        operator: by_pattern(spatial(3))
        for operator in (
            aten.max_pool3d_with_indices.default,
            aten.max_pool3d_with_indices_backward.default,
            aten.avg_pool3d.default,
            aten.avg_pool3d_backward.default,
            aten._adaptive_avg_pool3d.default,
            aten._adaptive_avg_pool3d_backward.default,
            # Channels become pixels in groups, which a split need not respect.
            aten.pixel_shuffle.default,
            aten.pixel_unshuffle.default,
        )
    },
}
