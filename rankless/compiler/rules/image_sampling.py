"""Rules for images that are sampled at places, or cut into patches: the batch can be sharded."""

from typing import Any

import torch

from rankless.compiler.rules.pattern import make_letters, make_masked_rule, make_pattern_rule
from rankless.compiler.rules.pooling import make_spatial_pattern
from rankless.compiler.rules.strategy import GraphBuilder, LocalValue, OperatorCall, ShardingRule, logical_shape
from rankless.compiler.rules.views import make_size_lowering

aten = torch.ops.aten


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
