"""Batch, layer, group and RMS normalisation."""

from collections.abc import Iterator
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from rankless.compiler.ir import local_kernels
from rankless.compiler.rules.pattern import by_pattern, letters, masked, split
from rankless.compiler.rules.strategy import Call, Emit, Local, Rule, Strategy, local_shape, shape_of
from rankless.compiler.tracing.symbolic_sizes import known
from rankless.parallel.placement import Placement, Replicate, Shard

aten = torch.ops.aten


def leading(call: Call) -> str:
    """Letters on the dims that are not normalised over."""
    count = len(shape_of(call.inputs[0]))
    return letters(count, range(-len(call.argument("normalized_shape")), 0))


def layer_norm(call: Call) -> str:
    """Output, mean and reciprocal deviation of every row."""
    text = leading(call)
    return f"{text},*,*->{text},{text},{text}"


def rms_norm(call: Call) -> str:
    """Output and reciprocal root of every row."""
    text = leading(call)
    return f"{text},*->{text},{text}"


def layer_norm_back(call: Call) -> str:
    """Gradients of input, weight and bias; the last two are partial sums."""
    text = leading(call)
    return f"{text},{text},{text},{text},*,*->{text},*,*"


def rms_norm_back(call: Call) -> str:
    """Gradients of input and weight."""
    text = leading(call)
    return f"{text},{text},{text},*->{text},*"


def rows_at(position: int) -> Any:
    """Lower with the number of rows, a plain argument at a position, replaced by the local number."""

    def lower(emit: Emit, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Local:
        local = list(args)
        local[position] = emit.output_size(0)[0]
        return emit.call(call.operator, *local, **kwargs)

    return lower


def batch_split(call: Call, positions: tuple[int, ...]) -> Iterator[Placement]:
    """The ways in which the given inputs lie split on a dim other than the channels'."""
    found = []
    for position in positions:
        placement = call.current[position]
        if isinstance(placement, Shard) and placement.dim != 1 and placement not in found:
            found.append(placement)
    yield from found


def counts_per_channel(call: Call, position: int, placement: Placement, mesh_size: int) -> list[int]:
    """Every rank's number of values per channel."""
    shape = shape_of(call.inputs[position])
    counts = []
    for rank in range(mesh_size):
        sizes = local_shape(shape, placement, rank)
        counts.append(prod(sizes[:1] + sizes[2:]))
    return counts


def batch_norm(call: Call) -> Iterator[Strategy]:
    """In training the statistics are those of all ranks' rows (see kernels, Note [merged moments])."""
    if not call.argument("training"):
        yield from split(call, batch_norm_with_constants(call))
        return
    for placement in batch_split(call, (0,)):
        inputs = (placement,) + (Replicate(),) * (len(call.inputs) - 1)
        outputs = (placement,) + (Replicate(),) * (len(call.output_shapes) - 1)
        yield Strategy(inputs, outputs, batch_norm_over(placement))


def moments_bytes(x: fx.Node) -> int:
    """The size of two numbers per channel, in float32 at least."""
    value = x.meta["val"]
    return int(2 * known(value.shape[1]) * max(value.element_size(), torch.float32.itemsize))


def batch_norm_over(placement: Placement) -> Any:
    """Lower to local moments, one gathering, and the rest locally."""

    def lower(emit: Emit, call: Call, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Local:
        has_running = "running_mean" in {described.name for described in call.operator._schema.arguments}
        x, weight, bias = args[:3]
        running = (args[3], args[4]) if has_running else (None, None)
        moments = emit.call(local_kernels.channel_moments, x)
        gathered = emit.all_gather(moments, "statistics of the whole batch", moments_bytes(call.inputs[0]))
        counts = counts_per_channel(call, 0, placement, call.mesh_size)
        settings = (tuple(counts), call.argument("momentum"), call.argument("eps"))
        results = emit.call(local_kernels.batch_norm, x, (weight, bias), running, gathered, settings)
        return tuple(emit.call(getitem, results, index) for index in range(len(call.output_shapes)))

    return lower


def batch_norm_with_constants(call: Call) -> str:
    """With given statistics every dim but the channels' may be split."""
    text = letters(len(shape_of(call.inputs[0])), [1])
    rest = ",*" * (len(call.slots) - 1)
    return f"{text}{rest}->" + ",".join([text] + ["="] * (len(call.output_shapes) - 1))


def batch_norm_back(call: Call) -> Iterator[Strategy]:
    """In training the sums over the batch are reduced first; then everything is local."""
    if not call.argument("train"):
        text = letters(len(shape_of(call.inputs[0])), [1])
        yield from masked(lambda _: f"{text},{text},*,*,*,*,*->{text},*,*")(call)
        return
    for placement in batch_split(call, (0, 1)):
        inputs = (placement, placement) + (Replicate(),) * (len(call.inputs) - 2)
        yield Strategy(inputs, (placement, Replicate(), Replicate()), batch_norm_gradients_over(placement))


def batch_norm_gradients_over(placement: Placement) -> Any:
    """Lower to local sums, one reduction, and the rest locally."""

    def lower(emit: Emit, call: Call, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Local:
        grad, x, weight, _, _, mean, reciprocal = args[:7]
        found = emit.call(local_kernels.batch_norm_local_gradients, grad, x, weight, mean, reciprocal)
        direct, sums = emit.call(getitem, found, 0), emit.call(getitem, found, 1)
        total = emit.all_reduce(sums, "gradients of the whole batch's statistics", moments_bytes(call.inputs[1]))
        count = sum(counts_per_channel(call, 0, placement, call.mesh_size))
        by_input = emit.call(
            local_kernels.batch_norm_input_gradient, direct, x, weight, (total, mean, reciprocal), count
        )
        return by_input, emit.call(getitem, total, 0), emit.call(getitem, total, 1)

    return lower


RULES: dict[Any, Rule] = {
    aten.native_layer_norm.default: by_pattern(layer_norm),
    aten.native_layer_norm_backward.default: masked(layer_norm_back),
    aten._fused_rms_norm.default: by_pattern(rms_norm),
    aten._fused_rms_norm_backward.default: masked(rms_norm_back),
    aten.native_group_norm.default: by_pattern("b*,*,*->b*,b*,b*", lower=rows_at(3)),
    aten.native_group_norm_backward.default: masked(lambda _: "b*,b*,b*,b*,*->b*,*,*", rows_at(5)),
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm,
    aten._native_batch_norm_legit_no_training.default: by_pattern(batch_norm_with_constants),
    aten.native_batch_norm_backward.default: batch_norm_back,
}
