"""Rules for pooling, unpooling, padding and sampling of images, and for cutting them into patches.

Batch and channels can be sharded, the last dims cannot.

Capture decomposes resizing into indexing.
"""

from collections.abc import Iterator
from typing import Any

import torch

from rankless.compiler.rules.pattern import (
    has_rows,
    make_letters,
    make_masked_rule,
    make_pattern_rule,
    require_rows,
    split_strategies,
)
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    OperatorCall,
    ShardingRule,
    Strategy,
    logical_shape,
)
from rankless.compiler.rules.views import make_size_lowering

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


def make_average_rule(dims: int) -> ShardingRule:
    """Return the rule of a mean of the last `dims` dims to a given size: those that keep their size can be sharded."""
    spatial_pattern = make_spatial_pattern(dims)

    def strategies(call: OperatorCall) -> Iterator[Strategy]:
        yield from split_strategies(call, spatial_pattern(call))
        inputs, outputs = logical_shape(call.inputs[0]), call.output_shapes[0]
        count = len(inputs)
        changed = [dim for dim in range(count) if dim < count - dims or inputs[dim] != outputs[dim]]
        text = make_letters(count, changed)
        lower = lower_to_local_size if len(call.inputs) == 1 else None
        for strategy in split_strategies(call, ",".join([text] * len(call.inputs)) + "->" + text, lower):
            if all(map(has_rows, strategy.inputs)):
                yield strategy

    return strategies


def lower_to_local_size(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Call a pooling operator with the size of the rank's part of the result."""
    size = builder.output_size(0)[-len(call.argument("output_size")) :]
    return builder.call(call.operator, args[0], size)


def patches_pattern(call: OperatorCall) -> str:
    """Return the pattern of images to patches and back; an image without a batch dim has none to shard."""
    count, out = len(logical_shape(call.inputs[0])), len(call.output_shapes[0])
    is_batched = max(count, out) == 4
    return "b" + "." * (count - 1) + "->b" + "." * (out - 1) if is_batched else "." * count + "->" + "." * out


def lower_grid(builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> LocalValue:
    """Replace the batch in the size of the images by the rank's."""
    size = [builder.output_size(0)[0], *args[1][1:]]
    return builder.call(call.operator, args[0], size, *args[2:])


def fractional_pool_pattern(call: OperatorCall) -> str:
    """Return the pattern of pooling over random regions, given for each sample and channel."""
    dims = 2 if "2d" in str(call.operator) else 3
    count = len(logical_shape(call.inputs[0]))
    text = make_letters(count, range(-dims, 0))
    samples = "ab." if count == dims + 2 else ".a."
    return f"{text},{samples}->{text},{text}"


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
            aten.adaptive_max_pool3d.default,
            aten.adaptive_max_pool3d_backward.default,
            aten.reflection_pad3d.default,
            aten.reflection_pad3d_backward.default,
            aten.replication_pad3d.default,
            aten.replication_pad3d_backward.default,
            aten.max_unpool3d.default,
        )
    },
    aten._adaptive_avg_pool2d.default: make_average_rule(2),
    aten._adaptive_avg_pool2d_backward.default: make_average_rule(2),
    aten._adaptive_avg_pool3d.default: make_average_rule(3),
    aten._adaptive_avg_pool3d_backward.default: make_average_rule(3),
    aten.grid_sampler_2d.default: make_pattern_rule("bc..,bhw.->bchw"),
    aten.grid_sampler_2d_backward.default: make_masked_rule(lambda _: "bchw,bc..,bhw.->bc..,bhw."),
    aten.grid_sampler_3d.default: make_pattern_rule("bc...,bdhw.->bcdhw"),
    aten.grid_sampler_3d_backward.default: make_masked_rule(lambda _: "bcdhw,bc...,bdhw.->bc...,bdhw."),
    aten.affine_grid_generator.default: make_pattern_rule(
        lambda call: "b..->b" + "." * (len(call.output_shapes[0]) - 1), lower=lower_grid
    ),
    aten.im2col.default: make_pattern_rule(patches_pattern),
    aten.col2im.default: make_pattern_rule(patches_pattern),
    aten.fractional_max_pool2d.default: make_pattern_rule(fractional_pool_pattern),
    aten.fractional_max_pool3d.default: make_pattern_rule(fractional_pool_pattern),
    aten.fractional_max_pool2d_backward.default: make_pattern_rule(make_spatial_pattern(2)),
    aten.fractional_max_pool3d_backward.default: make_pattern_rule(make_spatial_pattern(3)),
    aten._upsample_bilinear2d_aa.default: make_pattern_rule(make_spatial_pattern(2)),
    aten._upsample_bicubic2d_aa.default: make_pattern_rule(make_spatial_pattern(2)),
    aten._upsample_bilinear2d_aa_backward.default: make_pattern_rule(
        make_spatial_pattern(2), lower=make_size_lowering(2)
    ),
    aten._upsample_bicubic2d_aa_backward.default: make_pattern_rule(
        make_spatial_pattern(2), lower=make_size_lowering(2)
    ),
}
