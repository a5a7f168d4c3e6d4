"""Lookups in tables of rows (`rankless.parameter_server`) as operators of a captured program.

Note [lookups in a program]: rows are no tensors of the program. An operator has the number of a `RowSource`, and asks
it for the rows of this worker's ids. The gradient operator gives the source the gradients of these rows, for the next
step. It returns the gradient of the table's weight, which tells optimizers that there are gradients
(`waiting_gradients`). This must happen once: no pass may merge or repeat a gradient operator, and
where all workers have all gradients of a lookup, the first of them alone gives them.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from rankless.compiler.rules.extension_operators import ExtensionOperator, Lookup
from rankless.compiler.rules.pattern import make_letters, split_strategies
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    OperatorCall,
    Strategy,
    logical_shape,
    make_replicated_strategy,
)
from rankless.parallel.tensor_placement import Replicate

WEIGHT_ELEMENTS = 2
"""Elements of the parameter that stands for a table of rows."""


class RowSource(Protocol):
    """Reads rows, and takes their gradients."""

    def read_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, int32 or int64, with one more dim than they have."""
        ...

    def request_rows(self, ids: Sequence[Tensor]) -> bool:
        """Ask for rows that the next program will read, without waiting; see Note [early rows].

        Args:
            ids: The ids of each lookup, in the order of the program.

        Returns:
            Whether that has been of use so far.
        """
        ...

    def add_gradients(self, ids: Tensor, gradients: Tensor) -> Tensor:
        """Take the gradients of rows. Return the gradient of the weight, of shape (1, 2)."""
        ...


_SOURCES: WeakValueDictionary[int, RowSource] = WeakValueDictionary()
_NUMBERS = itertools.count()


def register_source(source: RowSource) -> int:
    """Return the number by which operators know a source. No other source gets it, also when this one is gone.

    Workers that register their sources in the same order get the same numbers.
    """
    number = next(_NUMBERS)
    _SOURCES[number] = source
    return number


def request_rows(lookups: Iterable[tuple[int, Tensor]]) -> bool:
    """Ask sources for rows that the next program will read.

    Args:
        lookups: The number of the source and the ids of each lookup, in the order of the program.

    Returns:
        Whether that has been of use to any of them so far.
    """
    by_source: dict[int, list[Tensor]] = {}
    for source, ids in lookups:
        by_source.setdefault(source, []).append(ids)
    of_use = [_SOURCES[source].request_rows(ids) for source, ids in by_source.items()]
    return any(of_use)


@torch.library.custom_op("servers::table_rows", mutates_args=())
def table_rows(weight: Tensor, ids: Tensor, source: int, dim: int) -> Tensor:
    """Return the rows of ids, of shape (*ids.shape, dim), like the weight in dtype and device."""
    rows: Tensor = run_table_rows(weight, ids, source, dim)
    return rows


@table_rows.register_fake
def _(weight: Tensor, ids: Tensor, _source: int, dim: int) -> Tensor:
    return weight.new_empty((*ids.shape, dim))


@Lookup
def run_table_rows(weight: Tensor, ids: Tensor, source: int, _dim: int) -> Tensor:
    """Look rows up."""
    return _SOURCES[source].read_rows(ids).to(weight.device)


@torch.library.custom_op("servers::table_gradients", mutates_args=())
def table_gradients(gradients: Tensor, ids: Tensor, source: int) -> Tensor:
    """Give a source the gradients of one lookup. Return the dense gradient of its weight, of shape (1, 2)."""
    return run_table_gradients(gradients, ids, source)


@table_gradients.register_fake
def _(gradients: Tensor, _ids: Tensor, _source: int) -> Tensor:
    return gradients.new_empty((1, 2))


def run_table_gradients(gradients: Tensor, ids: Tensor, source: int, *, counts: bool = True) -> Tensor:
    """Give a source the gradients of this worker's ids.

    Args:
        gradients: The gradients of rows.
        ids: Their ids.
        source: The number of the source.
        counts: Whether this worker is the one that counts the lookup in the gradient of the weight. The others return
            zeros, or numbers that are not finite, as their gradients are.
    """
    found = _SOURCES[source].add_gradients(ids, gradients).to(gradients.device)
    return found if counts else found - 1


def skip_table_gradients(gradients: Tensor) -> Tensor:
    """Return zeros for the gradient of a weight, where another worker gives the source these gradients."""
    return gradients.new_zeros((1, 2))


def _save_ids(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  # PyTorch passes it by name
    _, ids, ctx.source, _ = inputs
    ctx.save_for_backward(ids)


def _backward(ctx: Any, gradients: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    values = table_gradients(gradients, ids, ctx.source)
    places = torch.zeros(1, 1, dtype=torch.int64, device=values.device)
    weight = torch.sparse_coo_tensor(places, values, values.shape, check_invariants=False)
    return weight, None, None, None


table_rows.register_autograd(_backward, setup_context=_save_ids)


def table_rows_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of a lookup in a table of rows: every dim of the ids can be sharded."""
    text = make_letters(len(logical_shape(call.inputs[1])))
    yield from split_strategies(call, f"..,{text}->{text}.")


def table_gradients_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of the gradients of a lookup, each of which one worker gives its source.

    The gradient of the weight is a sum over the workers. Where all have all gradients, the first one gives them.
    """
    text = make_letters(len(logical_shape(call.inputs[1])))
    for strategy in split_strategies(call, f"{text}.,{text}->.."):
        yield replace(strategy, outputs=(Replicate(),), lower=lower_gradients, joins_pieces=True)
    yield replace(make_replicated_strategy(call), lower=lower_gradients_of_first_rank, joins_pieces=True)


def lower_gradients(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Let each rank give the source the gradients of its ids."""
    own = builder.call(run_table_gradients, *args, counts=builder.rank == 0)
    return sum_weight_gradients(builder, call, own)


def lower_gradients_of_first_rank(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Let the first rank alone give the source gradients that all ranks have."""
    if builder.rank == 0:
        return sum_weight_gradients(builder, call, builder.call(run_table_gradients, *args))
    nothing = builder.call(skip_table_gradients, args[0])
    return sum_weight_gradients(builder, call, nothing)


def sum_weight_gradients(builder: GraphBuilder, call: OperatorCall, own: fx.Node) -> LocalValue:
    """Add what all ranks have for the gradient of a table's weight, so that a number that is not finite reaches all."""
    size = call.node.meta["val"].dtype.itemsize * WEIGHT_ELEMENTS
    return builder.all_reduce(own, "the gradient of a table's weight", size)


OPERATORS: Mapping[Any, ExtensionOperator] = {
    torch.ops.servers.table_rows.default: ExtensionOperator(rule=table_rows_strategies, local=run_table_rows),
    torch.ops.servers.table_gradients.default: ExtensionOperator(
        rule=table_gradients_strategies, local=run_table_gradients, has_effects=True
    ),
}
"""How programs run them; see Note [operators of extensions]."""
