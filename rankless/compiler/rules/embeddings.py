"""Rules for embeddings: indices and columns can be divided, and so can the rows of the table."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from rankless.compiler.ir import row_lookups, vocabulary_kernels
from rankless.compiler.rules.pattern import make_letters, partial_sum_strategies, split_strategies
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    OperatorCall,
    ShardingRule,
    Strategy,
    find_local_range,
    logical_shape,
    make_replicated_strategy,
)
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.tensor_placement import Replicate, Shard

aten = torch.ops.aten
rankless_ops = torch.ops.rankless


def embedding_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of rows of a table by index.

    Every dim of the indices can be sharded, and the columns. With the table's rows sharded, each rank looks up the
    indices in its range, and the result is a partial sum in which all other entries are zero.
    """
    text = make_letters(len(logical_shape(call.inputs[1])))
    yield from split_strategies(call, f".Z,{text}->{text}Z")
    yield from split_strategies(call, "Z.,*->" + "." * (len(text) + 1), lower_lookup)


def lower_lookup(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Look up the rows that this rank has."""
    count = logical_shape(call.inputs[0])[0]
    start, _ = find_local_range(builder, builder.input_sharding(0), 0, count)
    return builder.call(vocabulary_kernels.look_up_rows, args[0], args[1], start, count)


def embedding_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of the table's gradient.

    Sharded indices give partial sums, unless the gradient is divided by the frequency of an index. If the gradient is
    kept in pieces of rows, each rank computes its own from all indices. A partial sum is then not an input if the sum
    of the whole table would send more bytes than that of the input.
    """
    if not call.argument("scale_grad_by_freq"):
        text = make_letters(len(logical_shape(call.inputs[1])))
        yield from split_strategies(call, f"{text}.,{text}->..")
    columns = "." * len(logical_shape(call.inputs[1]))
    yield from split_strategies(call, f"{columns}Z,{columns}->.Z")
    if isinstance(call.wanted, Shard) and call.wanted.dim == 0:
        yield Strategy((Replicate(), Replicate()), (call.wanted,), lower_gradient_of_rows)
        if 2 * size_hint(call.inputs[1].meta["val"].numel()) <= size_hint(call.argument("num_weights")):
            return
    yield from partial_sum_strategies(call, (0,))


def lower_gradient_of_rows(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Compute the gradient of the rows that this rank has."""
    rows = find_local_range(builder, builder.output_sharding(0), 0, call.argument("num_weights"))
    options = call.argument("padding_idx"), call.argument("scale_grad_by_freq")
    return builder.call(vocabulary_kernels.add_to_own_rows, args[0], args[1], rows, *options)


def weight_rows_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of a lookup with a sparse gradient: every dim of the ids can be sharded."""
    text = make_letters(len(logical_shape(call.inputs[1])))
    yield from split_strategies(call, f"..,{text}->{text}.", lower_weight_rows)
    yield replace(make_replicated_strategy(call), lower=lower_weight_rows)


def lower_weight_rows(
    builder: GraphBuilder, _call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Look rows up wherever they are: an operator of PyTorch would read the whole of a weight on servers."""
    return builder.call(row_lookups.run_weight_rows, *args)


def replicated_strategies(_call: OperatorCall) -> Iterator[Strategy]:
    """Yield nothing: every rank computes the whole."""
    yield from ()


RULES: dict[Any, ShardingRule] = {
    aten.embedding.default: embedding_strategies,
    aten.embedding_dense_backward.default: embedding_backward_strategies,
    rankless_ops.weight_rows.default: weight_rows_strategies,
    rankless_ops.weight_gradients.default: replicated_strategies,
    rankless_ops.bag_numbers.default: replicated_strategies,
}
