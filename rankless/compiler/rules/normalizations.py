"""Rules for batch, layer, group and RMS normalization, and for softmax.

Every dim of a softmax can be sharded, the normalized one too; see Note [sharded softmax] in `vocabulary_kernels`.
"""

from collections.abc import Iterator
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from rankless.compiler.ir import local_kernels, vocabulary_kernels
from rankless.compiler.rules.half_precision import ACCUMULATED_IN
from rankless.compiler.rules.pattern import (
    make_letters,
    make_masked_rule,
    make_pattern_rule,
    require_rows,
    split_strategies,
)
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    LoweringRule,
    OperatorCall,
    ShardingRule,
    Strategy,
    logical_shape,
)
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.tensor_placement import Placement, Replicate, Shard, compute_local_shape

aten = torch.ops.aten


def make_leading_letters(call: OperatorCall) -> str:
    """Return letters for the dims that are not normalized over."""
    count = len(logical_shape(call.inputs[0]))
    return make_letters(count, range(-len(call.argument("normalized_shape")), 0))


def layer_norm_pattern(call: OperatorCall) -> str:
    """Return the pattern of output, mean and reciprocal deviation of every row."""
    text = make_leading_letters(call)
    return f"{text},*,*->{text},{text},{text}"


def rms_norm_pattern(call: OperatorCall) -> str:
    """Return the pattern of output and reciprocal root of every row."""
    text = make_leading_letters(call)
    return f"{text},*->{text},{text}"


def layer_norm_backward_pattern(call: OperatorCall) -> str:
    """Return the pattern of the gradients of input, weight and bias; the last two are partial sums."""
    text = make_leading_letters(call)
    return f"{text},{text},{text},{text},*,*->{text},*,*"


def rms_norm_backward_pattern(call: OperatorCall) -> str:
    """Return the pattern of the gradients of input and weight."""
    text = make_leading_letters(call)
    return f"{text},{text},{text},*->{text},*"


def make_row_count_lowering(position: int) -> Any:
    """Return a lowering that replaces the number of rows, a plain argument, by the local number."""

    def lower(builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalValue:
        local = list(args)
        local[position] = builder.output_size(0)[0]
        return builder.call(call.operator, *local, **kwargs)

    return lower


def list_batch_shards(call: OperatorCall, positions: tuple[int, ...]) -> Iterator[Placement]:
    """Yield the placements with which the given inputs are sharded on a dim other than the channels."""
    found = []
    for position in positions:
        placement = call.current_placements[position]
        if isinstance(placement, Shard) and placement.dim != 1 and placement not in found:
            found.append(placement)
    yield from found


def list_channel_shards(call: OperatorCall, count: int) -> Iterator[Shard]:
    """Yield the placements of the first `count` inputs with which an input is sharded on the channels.

    Channels are dim 1 of these inputs, and dim 0 of the others, such as weights and running statistics.
    Each rank then computes its channels alone. Instance norm is batch norm of one sample whose channels are those of
    all samples, so a shard of its channels is a shard of the batch.
    """
    found: list[tuple[int, ...]] = []
    for position, placement in enumerate(call.current_placements):
        channels = 1 if position < count else 0
        if isinstance(placement, Shard) and placement.dim == channels and placement.lengths not in found:
            found.append(placement.lengths)
            yield Shard(1, placement.lengths)


def count_per_channel(call: OperatorCall, position: int, placement: Placement) -> list[int]:
    """Return every rank's number of values per channel."""
    shape = logical_shape(call.inputs[position])
    counts = []
    for rank in range(call.ranks):
        sizes = compute_local_shape(shape, (placement,), (rank,))
        counts.append(prod(sizes[:1] + sizes[2:]))
    return counts


def batch_norm_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies; in training the statistics are those of all ranks (`local_kernels`, Note [merged moments])."""
    if not call.argument("training"):
        yield from split_strategies(call, batch_norm_inference_pattern(call))
        return
    for placement in list_batch_shards(call, (0,)):
        inputs = (placement,) + (Replicate(),) * (len(call.inputs) - 1)
        outputs = (placement,) + (Replicate(),) * (len(call.output_shapes) - 1)
        yield Strategy(inputs, outputs, make_batch_norm_lowering(placement))
    for placement in list_channel_shards(call, 1):
        inputs = (placement,) + (Shard(0, placement.lengths),) * (len(call.inputs) - 1)
        yield Strategy(inputs, (placement,) + (Shard(0, placement.lengths),) * (len(call.output_shapes) - 1))


def moments_bytes(x: fx.Node) -> int:
    """Return the size of two numbers per channel, in float32 at least."""
    value = x.meta["val"]
    return int(2 * size_hint(value.shape[1]) * max(value.element_size(), torch.float32.itemsize))


def make_batch_norm_lowering(placement: Placement) -> Any:
    """Return a lowering to local moments, one all-gather, and local normalization."""

    def lower(builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> LocalValue:
        has_running = "running_mean" in {described.name for described in call.operator._schema.arguments}
        x, weight, bias = args[:3]
        running = (args[3], args[4]) if has_running else (None, None)
        moments = builder.call(local_kernels.channel_moments, x)
        gathered = builder.all_gather(moments, "statistics of the whole batch", moments_bytes(call.inputs[0]))
        counts = count_per_channel(call, 0, placement)
        settings = (tuple(counts), call.argument("momentum"), call.argument("eps"))
        results = builder.call(local_kernels.batch_norm, x, (weight, bias), running, gathered, settings)
        return tuple(builder.call(getitem, results, index) for index in range(len(call.output_shapes)))

    return lower


def batch_norm_inference_pattern(call: OperatorCall) -> str:
    """Return the pattern with given statistics: every dim can be sharded, and the statistics with the channels."""
    text = make_letters(len(logical_shape(call.inputs[0])))
    rest = f",{text[1]}" * (len(call.slots) - 1)
    return f"{text}{rest}->" + ",".join([text] + ["="] * (len(call.output_shapes) - 1))


def batch_norm_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of the gradient; in training one all-reduce of the sums over the batch comes first."""
    if not call.argument("train"):
        text = make_letters(len(logical_shape(call.inputs[0])))
        channel = text[1]
        pattern = f"{text},{text},{channel},{channel},{channel},*,*->{text},{channel},{channel}"
        yield from make_masked_rule(lambda _: pattern)(call)
        return
    for placement in list_batch_shards(call, (0, 1)):
        inputs = (placement, placement) + (Replicate(),) * (len(call.inputs) - 2)
        yield Strategy(inputs, (placement, Replicate(), Replicate()), make_batch_norm_backward_lowering(placement))
    for placement in list_channel_shards(call, 2):
        channels = Shard(0, placement.lengths)
        inputs = (placement, placement) + (channels,) * (len(call.inputs) - 2)
        outputs = tuple(
            item if is_present else Replicate()
            for item, is_present in zip((placement, channels, channels), call.argument("output_mask"), strict=True)
        )
        yield Strategy(inputs, outputs)


def make_batch_norm_backward_lowering(placement: Placement) -> Any:
    """Return a lowering to local sums, one all-reduce, and local gradients."""

    def lower(builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> LocalValue:
        grad, x, weight, _, _, mean, reciprocal = args[:7]
        found = builder.call(local_kernels.batch_norm_local_gradients, grad, x, weight, mean, reciprocal)
        direct, sums = builder.call(getitem, found, 0), builder.call(getitem, found, 1)
        total = builder.all_reduce(sums, "gradients of the whole batch's statistics", moments_bytes(call.inputs[1]))
        count = sum(count_per_channel(call, 0, placement))
        by_input = builder.call(
            local_kernels.batch_norm_input_gradient, direct, x, weight, (total, mean, reciprocal), count
        )
        return by_input, builder.call(getitem, total, 0), builder.call(getitem, total, 1)

    return lower


SUMS = {
    aten._log_softmax_backward_data.default: vocabulary_kernels.add_log_softmax_terms,
    aten._softmax_backward_data.default: vocabulary_kernels.add_softmax_terms,
}
GRADIENTS = {
    aten._log_softmax_backward_data.default: vocabulary_kernels.finish_log_softmax_gradient,
    aten._softmax_backward_data.default: vocabulary_kernels.finish_softmax_gradient,
}


def get_softmax_dim(call: OperatorCall) -> int:
    """Return the dim along which values are normalized, counted from the first."""
    count = len(logical_shape(call.inputs[0]))
    return int(call.argument("dim")) % max(count, 1)


def make_softmax_rule(lower: LoweringRule) -> ShardingRule:
    """Return the rule of a softmax or its gradient, with its lowering for a sharded dim."""

    def rule(call: OperatorCall) -> Iterator[Strategy]:
        dim = get_softmax_dim(call)
        text = make_letters(len(logical_shape(call.inputs[0])), [dim])
        yield from split_strategies(call, ",".join([text] * len(call.inputs)) + f"->{text}")
        tried: list[Shard] = []
        for placement in call.current_placements:
            if isinstance(placement, Shard) and placement.dim == dim and placement not in tried:
                tried.append(placement)
                inputs = (placement,) * len(call.inputs)
                yield Strategy(inputs, (placement,), lower, joins_pieces=True)

    return rule


def count_row_bytes(call: OperatorCall, dtype: torch.dtype) -> int:
    """Return the size of one number for each row."""
    shape = logical_shape(call.inputs[0])
    dim = get_softmax_dim(call)
    return int(size_hint(prod(shape[:dim] + shape[dim + 1 :])) * dtype.itemsize)


def lower_softmax(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Lower to local maxima and sums, one all-gather, one all-reduce, and local quotients."""
    x, dim, result = args[0], get_softmax_dim(call), call.node.meta["val"].dtype
    given = call.inputs[0].meta["val"].dtype
    wide = ACCUMULATED_IN.get(result, result)
    maxima = builder.call(vocabulary_kernels.find_maxima, x, dim)
    gathered = builder.all_gather(maxima, "maxima of softmax", count_row_bytes(call, given))
    shifted = builder.call(vocabulary_kernels.subtract_maxima, x, gathered, wide)
    sums = builder.call(vocabulary_kernels.add_exponentials, shifted, dim)
    total = builder.all_reduce(sums, "sums of softmax", count_row_bytes(call, wide))
    if call.operator is aten._log_softmax.default:
        return builder.call(vocabulary_kernels.finish_log_softmax, shifted, total, result)
    if call.operator is aten._softmax.default:
        return builder.call(vocabulary_kernels.finish_softmax, shifted, total, result)
    return builder.call(vocabulary_kernels.finish_safe_softmax, shifted, total, gathered, result)


def lower_softmax_gradient(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Lower to local sums, one all-reduce, and local gradients."""
    grad, output = args[:2]
    given = call.inputs[1].meta["val"].dtype
    sums = builder.call(SUMS[call.operator], grad, output, get_softmax_dim(call))
    size = count_row_bytes(call, ACCUMULATED_IN.get(given, given))
    total = builder.all_reduce(sums, "sums of the gradient of softmax", size)
    return builder.call(GRADIENTS[call.operator], grad, output, total, call.node.meta["val"].dtype)


RULES: dict[Any, ShardingRule] = {
    aten.native_layer_norm.default: make_pattern_rule(layer_norm_pattern),
    aten.native_layer_norm_backward.default: make_masked_rule(layer_norm_backward_pattern),
    aten._fused_rms_norm.default: make_pattern_rule(rms_norm_pattern),
    aten._fused_rms_norm_backward.default: make_masked_rule(rms_norm_backward_pattern),
    aten.native_group_norm.default: make_pattern_rule("b*,*,*->b*,b*,b*", lower=make_row_count_lowering(3)),
    aten.native_group_norm_backward.default: make_masked_rule(
        lambda _: "b*,b*,b*,b*,*->b*,*,*", make_row_count_lowering(5)
    ),
    aten._native_batch_norm_legit_functional.default: require_rows(batch_norm_strategies, dim=1),
    aten._native_batch_norm_legit.no_stats: require_rows(batch_norm_strategies, dim=1),
    aten._native_batch_norm_legit_no_training.default: require_rows(
        make_pattern_rule(batch_norm_inference_pattern), dim=1
    ),
    aten.native_batch_norm_backward.default: require_rows(batch_norm_backward_strategies, dim=1),
    **dict.fromkeys(
        (aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default),
        make_softmax_rule(lower_softmax),
    ),
    **dict.fromkeys(
        (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
        make_softmax_rule(lower_softmax_gradient),
    ),
}
