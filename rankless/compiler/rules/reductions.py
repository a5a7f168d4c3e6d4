"""Sums, means, extremes and operators that work along some dims and leave the others alone."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch

from rankless.compiler.rules.pattern import by_pattern, letters, split, sums
from rankless.compiler.rules.strategy import Call, Emit, Local, Rule, Strategy, shape_of
from rankless.parallel.placement import Partial

aten = torch.ops.aten


def reduced_dims(call: Call) -> list[int]:
    """The dims that a reduction removes; all of them if none is named."""
    count = len(shape_of(call.inputs[0]))
    names = {described.name for described in call.operator._schema.arguments}
    dims = call.argument("dim") if "dim" in names else call.argument("dims") if "dims" in names else None
    if dims is None or dims == []:
        return list(range(count))
    return [dim % count for dim in (dims if isinstance(dims, list | tuple) else [dims])] if count else []


def keeps_dims(call: Call) -> bool:
    """Whether reduced dims stay, with size one."""
    return any(
        described.name == "keepdim" and call.argument("keepdim") for described in call.operator._schema.arguments
    )


def summed_pattern(call: Call) -> str:
    """All dims may be split; those reduced give partial results."""
    text = letters(len(shape_of(call.inputs[0])))
    reduced = reduced_dims(call)
    kept = ("." if dim in reduced else letter for dim, letter in enumerate(text))
    out = kept if keeps_dims(call) else (letter for dim, letter in enumerate(text) if dim not in reduced)
    return text + "->" + "".join(out)


def mean_as_sum(emit: Emit, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Local:
    """Note [sums over counts]: a mean over an unevenly split dim is wrong as a mean of means, so every normalising
    operator is lowered as a sum and a division by the logical count.
    """
    reduced = reduced_dims(call)
    count = prod(shape_of(call.inputs[0])[dim] for dim in reduced)
    total = emit.call(aten.sum.dim_IntList, args[0], reduced, keeps_dims(call), dtype=kwargs.get("dtype"))
    return emit.call(aten.div.Tensor, total, count)


def mean(call: Call) -> Iterator[Strategy]:
    """Split on any dim; a mean over a split dim is a sum over the logical count."""
    yield from split(call, summed_pattern(call), mean_as_sum)
    yield from sums(call, (0,))


def extreme(call: Call) -> Iterator[Strategy]:
    """Split on any dim; over a split dim each rank has the extreme of its part."""
    name = "max" if "max" in str(call.operator) else "min"
    for strategy in split(call, summed_pattern(call)):
        outputs = tuple(
            Partial(name) if isinstance(placement, Partial) else placement for placement in strategy.outputs
        )
        yield replace(strategy, outputs=outputs)


def alongside(call: Call) -> str:
    """The dims named stay whole; the result has the same dims (or lacks the named ones)."""
    count = len(shape_of(call.inputs[0]))
    whole = reduced_dims(call)
    text = letters(count, whole)
    outputs = []
    for shape in call.output_shapes:
        same = len(shape) == count
        outputs.append(text if same else "".join(letter for dim, letter in enumerate(text) if dim not in whole))
    return ",".join([text] * len(call.slots)) + "->" + ",".join(outputs)


def last_dims_whole(count: int) -> Rule:
    """Matrices in batches: the last `count` dims stay whole."""

    def pattern(call: Call) -> str:
        text = letters(len(shape_of(call.inputs[0])), [-1 - back for back in range(count)])
        return f"{text}->{text}"

    return by_pattern(pattern, (0,))


RULES: dict[Any, Rule] = {
    aten.sum.default: by_pattern(summed_pattern, (0,)),
    aten.sum.dim_IntList: by_pattern(summed_pattern, (0,)),
    aten.mean.default: mean,
    aten.mean.dim: mean,
    aten.max.default: extreme,
    aten.min.default: extreme,
    aten.amax.default: extreme,
    aten.amin.default: extreme,
    aten.tril.default: last_dims_whole(2),
    aten.triu.default: last_dims_whole(2),
    **{
        operator: by_pattern(alongside)
        for operator in (
            aten._softmax.default,
            aten._safe_softmax.default,
            aten._log_softmax.default,
            aten._softmax_backward_data.default,
            aten._log_softmax_backward_data.default,
            aten.argmax.default,
            aten.argmin.default,
            aten.max.dim,
            aten.min.dim,
            aten.any.dim,
            aten.all.dim,
            aten.any.dims,
            aten.all.dims,
            aten.prod.dim_int,
            aten.cumsum.default,
            aten.cumprod.default,
            aten.sort.default,
            aten.topk.default,
            aten.flip.default,
            aten.logcumsumexp.default,
        )
    },
}
"""`dim` (or `dims`) names what stays whole; argmax without a dim keeps all of it whole."""
