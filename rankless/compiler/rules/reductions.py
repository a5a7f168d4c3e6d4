"""Rules for sums, means, extrema, and operators that work along some dims only."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch

from rankless.compiler.rules.half_precision import ACCUMULATED_IN, add_in_float32, widen_sums
from rankless.compiler.rules.pattern import (
    make_letters,
    make_pattern_rule,
    partial_sum_strategies,
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
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.tensor_placement import Partial, Replicate

aten = torch.ops.aten


def get_reduced_dims(call: OperatorCall) -> list[int]:
    """Return the dims that a reduction removes; all of them if it names none."""
    count = len(logical_shape(call.inputs[0]))
    names = {described.name for described in call.operator._schema.arguments}
    dims = call.argument("dim") if "dim" in names else call.argument("dims") if "dims" in names else None
    if dims is None or dims == []:
        return list(range(count))
    return [dim % count for dim in (dims if isinstance(dims, list | tuple) else [dims])] if count else []


def has_keepdim(call: OperatorCall) -> bool:
    """Return whether reduced dims stay with size one."""
    return any(
        described.name == "keepdim" and call.argument("keepdim") for described in call.operator._schema.arguments
    )


def reduction_pattern(call: OperatorCall) -> str:
    """Return the pattern of a reduction: all dims can be sharded, and the reduced ones give partial results."""
    text = make_letters(len(logical_shape(call.inputs[0])))
    reduced = get_reduced_dims(call)
    kept = ("." if dim in reduced else letter for dim, letter in enumerate(text))
    out = kept if has_keepdim(call) else (letter for dim, letter in enumerate(text) if dim not in reduced)
    return text + "->" + "".join(out)


def lower_mean_as_sum(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Lower a mean to a sum and a division by the logical count.

    Note [sums over counts]: a mean of means is wrong for a dim that is split unevenly. Every normalizing operator is
    therefore lowered to a sum and a division by the logical count. In half precision the sum may be too large for the
    dtype of the mean, so it is computed in float32, as in PyTorch's kernels.
    """
    reduced = get_reduced_dims(call)
    count = prod(logical_shape(call.inputs[0])[dim] for dim in reduced)
    result = call.node.meta["val"].dtype
    wide = ACCUMULATED_IN.get(result, result)
    total = builder.call(aten.sum.dim_IntList, args[0], reduced, has_keepdim(call), dtype=wide)
    mean = builder.call(aten.div.Tensor, total, count)
    return mean if wide == result else builder.call(aten.to.dtype, mean, result)


def lower_wide_sum(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Lower a sum in half precision to one over all ranks in float32, which is rounded once at the end."""
    wide = ACCUMULATED_IN[call.node.meta["val"].dtype]
    operator = aten.nansum.default if call.operator is aten.nansum.default else aten.sum.dim_IntList
    term = builder.call(operator, args[0], get_reduced_dims(call), has_keepdim(call), dtype=wide)
    return add_in_float32(builder, call, term)


def nansum_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategies of a sum, except those for partial sums: where one is NaN, the whole one is."""
    yield from additive_strategies(call, make_pattern_rule(reduction_pattern))


def sum_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on any dim; a sum over a sharded dim is partial, and so is a sum of partial sums."""
    yield from additive_strategies(call, make_pattern_rule(reduction_pattern, (0,)))


def additive_strategies(call: OperatorCall, rule: ShardingRule) -> Iterator[Strategy]:
    """Yield those strategies of a sum whose partial results are terms of the whole one.

    A sum of booleans means `any`, so it has no partial results.
    """
    is_boolean = call.node.meta["val"].dtype == torch.bool
    for strategy in widen_sums(rule, lower_wide_sum)(call):
        is_partial = any(isinstance(placement, Partial) for placement in strategy.outputs)
        if not (is_partial and is_boolean) or call.node.meta.get("backward"):
            yield strategy


def mean_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on any dim; a mean over a sharded dim is a sum divided by the logical count."""
    yield from split_strategies(call, reduction_pattern(call), lower_mean_as_sum)
    yield from partial_sum_strategies(call, (0,))


def extremum_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on any dim; over a sharded dim each rank has the extremum of its part."""
    name = "max" if "max" in str(call.operator) else "min"
    for strategy in split_strategies(call, reduction_pattern(call)):
        outputs = tuple(
            Partial(name) if isinstance(placement, Partial) else placement for placement in strategy.outputs
        )
        yield replace(strategy, outputs=outputs)


def truth_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on any dim for `any` and `all`: they are the maximum and the minimum of truth values."""
    if any(described.name == "dim" and call.argument("dim") == [] for described in call.operator._schema.arguments):
        return  # without dims they reduce nothing
    name = "max" if "any" in str(call.operator) else "min"
    for strategy in split_strategies(call, reduction_pattern(call)):
        (placement,) = strategy.outputs
        yield replace(strategy, outputs=(Partial(name) if isinstance(placement, Partial) else placement,))


def both_extrema_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on any dim for a minimum and a maximum together."""
    text, out = reduction_pattern(call).split("->")
    for strategy in split_strategies(call, f"{text}->{out},{out}"):
        outputs = tuple(
            Partial(name) if isinstance(placement, Partial) else placement
            for placement, name in zip(strategy.outputs, ("min", "max"), strict=True)
        )
        yield replace(strategy, outputs=outputs)


def product_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on any dim; over a sharded dim the products of all parts are gathered and multiplied."""
    for strategy in split_strategies(call, reduction_pattern(call)):
        if isinstance(strategy.outputs[0], Partial):
            yield Strategy(strategy.inputs, (Replicate(),), lower_product)
        else:
            yield strategy


def lower_product(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Multiply the products of all ranks' parts. In half precision they may be too large, so they are in float32."""
    value = call.node.meta["val"]
    wide = ACCUMULATED_IN.get(value.dtype, value.dtype)
    if call.operator is aten.prod.default:
        local = builder.call(aten.prod.default, args[0], dtype=wide)
    else:
        local = builder.call(aten.prod.dim_int, args[0], args[1], has_keepdim(call), dtype=wide)
    gathered = builder.all_gather(local, "products of all parts", int(size_hint(value.numel()) * wide.itemsize))
    product = builder.call(aten.prod.dim_int, gathered, 0)
    return product if wide == value.dtype else builder.call(aten.to.dtype, product, value.dtype)


def along_dims_pattern(call: OperatorCall) -> str:
    """Return the pattern of an operator along some dims: these are replicated, and each output has or lacks them."""
    count = len(logical_shape(call.inputs[0]))
    is_flip_of_nothing = call.operator is aten.flip.default and not call.argument("dims")
    replicated_dims = [] if is_flip_of_nothing else get_reduced_dims(call)
    text = make_letters(count, replicated_dims)
    outputs = []
    for shape in call.output_shapes:
        has_same_dims = len(shape) == count
        outputs.append(
            text if has_same_dims else "".join(letter for dim, letter in enumerate(text) if dim not in replicated_dims)
        )
    return ",".join([text] * len(call.slots)) + "->" + ",".join(outputs)


def histogram_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on any dim of a histogram with a given range: the counts of all parts add up."""
    if call.argument("min") != call.argument("max"):
        yield from split_strategies(call, make_letters(len(logical_shape(call.inputs[0]))) + "->.")


def make_last_dims_rule(count: int) -> ShardingRule:
    """Return a rule for batches of matrices: the last `count` dims are replicated."""

    def pattern(call: OperatorCall) -> str:
        text = make_letters(len(logical_shape(call.inputs[0])), [-1 - back for back in range(count)])
        return f"{text}->{text}"

    return make_pattern_rule(pattern, (0,))


def transform_pattern(call: OperatorCall) -> str:
    """Return the pattern of a Fourier transform of some dims: every other dim can be sharded."""
    text = make_letters(len(logical_shape(call.inputs[0])), call.argument("dim"))
    return f"{text}->{text}"


RULES: dict[Any, ShardingRule] = {
    aten.sum.default: sum_strategies,
    aten.sum.dim_IntList: sum_strategies,
    aten.nansum.default: nansum_strategies,
    aten.count_nonzero.default: make_pattern_rule(reduction_pattern),
    aten.count_nonzero.dim_IntList: make_pattern_rule(reduction_pattern),
    aten.mean.default: mean_strategies,
    aten.mean.dim: mean_strategies,
    aten.max.default: extremum_strategies,
    aten.min.default: extremum_strategies,
    aten.amax.default: extremum_strategies,
    aten.amin.default: extremum_strategies,
    aten.aminmax.default: require_rows(both_extrema_strategies),
    aten.prod.default: product_strategies,
    aten.prod.dim_int: product_strategies,
    **dict.fromkeys(
        (
            aten.any.default,
            aten.all.default,
            aten.any.dim,
            aten.all.dim,
            aten.any.dims,
            aten.all.dims,
        ),
        truth_strategies,
    ),
    aten.trace.default: make_pattern_rule("..->", (0,)),
    aten.histc.default: histogram_strategies,
    **dict.fromkeys(
        (aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default),
        require_rows(make_pattern_rule(transform_pattern)),
    ),
    aten.tril.default: make_last_dims_rule(2),
    aten.triu.default: make_last_dims_rule(2),
    **{
        operator: make_pattern_rule(along_dims_pattern)
        for operator in (
            aten.argmax.default,
            aten.argmin.default,
            aten.max.dim,
            aten.min.dim,
            aten.cumsum.default,
            aten.cumprod.default,
            aten.cummax.default,
            aten.cummin.default,
            aten.sort.default,
            aten.sort.stable,
            aten.topk.default,
            aten.kthvalue.default,
            aten.median.dim,
            aten.nanmedian.dim,
            aten.mode.default,
            aten.logcumsumexp.default,
            aten.glu.default,
            aten.glu_backward.default,
        )
    },
    **dict.fromkeys(
        (aten.flip.default, aten.roll.default),
        make_pattern_rule(along_dims_pattern, (0,)),
    ),
}
"""`dim` (or `dims`) names the replicated dims; argmax or roll without a dim replicates all."""
