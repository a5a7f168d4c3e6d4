"""Rules for pooling, unpooling and padding of images: batch and channels can be sharded, the last dims cannot.

Capture decomposes resizing into indexing.
"""

from typing import Any

import torch

from rankless.compiler.rules.pattern import make_letters, make_pattern_rule, require_rows
from rankless.compiler.rules.strategy import OperatorCall, ShardingRule, logical_shape

aten = torch.ops.aten


def make_spatial_pattern(dims: int) -> Any:
    """Return a pattern that replicates the last `dims` dims of every tensor."""

    def pattern(call: OperatorCall) -> str:
        replicated_dims = range(-dims, 0)
        texts = [
            make_letters(len(logical_shape(node)), replicated_dims) if node is not None else "" for node in call.slots
        ]
        outputs = [make_letters(len(shape), replicated_dims) for shape in call.output_shapes]
        return ",".join(texts) + "->" + ",".join(outputs)

    return pattern


RULES: dict[Any, ShardingRule] = {
    **{
        operator: require_rows(make_pattern_rule(make_spatial_pattern(1)))
        for operator in (
            aten.reflection_pad1d.default,
            aten.reflection_pad1d_backward.default,
            aten.replication_pad1d.default,
            aten.replication_pad1d_backward.default,
        )
    },
    **{
        operator: make_pattern_rule(make_spatial_pattern(2))
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
            aten.max_unpool2d.default,
        )
    },
    **{
        operator: make_pattern_rule(make_spatial_pattern(3))
        for operator in (
            aten.max_pool3d_with_indices.default,
            aten.max_pool3d_with_indices_backward.default,
            aten.avg_pool3d.default,
            aten.avg_pool3d_backward.default,
            aten._adaptive_avg_pool3d.default,
            aten._adaptive_avg_pool3d_backward.default,
            aten.adaptive_max_pool3d.default,
            aten.adaptive_max_pool3d_backward.default,
            aten.reflection_pad3d.default,
            aten.reflection_pad3d_backward.default,
            aten.replication_pad3d.default,
            aten.replication_pad3d_backward.default,
            aten.max_unpool3d.default,
            # These turn groups of channels into pixels, and a shard boundary may lie inside a group.
            aten.pixel_shuffle.default,
            aten.pixel_unshuffle.default,
        )
    },
}
