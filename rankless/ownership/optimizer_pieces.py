"""Let a script's own optimizer step on this worker's pieces of parameters.

Note [steps on pieces]: during a step, the optimizer's groups and state refer to pieces in place of divided parameters.
Otherwise they refer to the parameters, as the script expects, and the state is made of divided tensors. This is exact
for optimizers that compute each element from the elements at the same place. `ELEMENTWISE` lists PyTorch's;
tests/jobs/test_optimizers.py shows for each that a step on the whole equals a step on parts, bit by bit.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.errors import ConfigError
from rankless.ownership.partitioned_tensor import (
    Partition,
    WholeValues,
    divide_parameter,
    find_partition,
    make_partitioned_tensor,
)
from rankless.ownership.piece_layout import PieceLayout

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""The optimizers that step on pieces exactly. A subclass may compute anything."""


@dataclass(frozen=True, kw_only=True)
class DividedParameter:
    """A parameter of which this worker has a piece for the optimizer.

    Attributes:
        parameter: What the script has.
        piece: What the optimizer steps on.
        layout: How the parameter is divided.
        name: What errors call it.
        divides_value: Whether the worker holds only its piece of the value.
        divides_gradient: Whether it holds only its piece of the gradient.
    """

    parameter: nn.Parameter
    piece: nn.Parameter
    layout: PieceLayout
    name: str
    divides_value: bool
    divides_gradient: bool

    @property
    def holder(self) -> nn.Parameter:
        """The tensor that has this worker's gradient."""
        return self.piece if self.divides_gradient else self.parameter

    def begin_step(self, rank: int) -> None:
        """Give the piece the value and the gradient that this worker's optimizer needs."""
        if not self.divides_value:
            if self.shares_memory:
                self.piece.data = self.layout.get_piece(self.parameter.data, rank)
            else:
                self.piece.data.copy_(self.layout.get_piece(self.parameter.data, rank))
        gradient = self.parameter.grad
        if not self.divides_gradient:
            self.piece.grad = None if gradient is None else self._take_piece(gradient, rank)

    def end_step(self) -> None:
        """Forget the piece of a gradient that the worker has whole."""
        if not self.divides_gradient:
            self.piece.grad = None

    @property
    def shares_memory(self) -> bool:
        """Whether the piece is a part of the parameter's memory."""
        is_as_planned = self.parameter.stride() == self.layout.strides
        return not self.divides_value and is_as_planned and self.layout.is_contiguous_piece()

    def _take_piece(self, gradient: Tensor, rank: int) -> Tensor:
        if gradient.layout is not torch.strided:
            raise ConfigError(
                expected=f"a dense gradient of {self.name}, which is divided between workers",
                found=f"a gradient with the layout {gradient.layout}",
                fix="use sparse=False, or no zero=",
            )
        if self.layout.is_contiguous_piece() and gradient.stride() == self.layout.strides:
            return self.layout.get_piece(gradient, rank)
        return self.layout.copy_piece(gradient, rank)


def make_divided_parameter(
    parameter: nn.Parameter,
    layout: PieceLayout,
    values: WholeValues,
    *,
    name: str,
    divides_value: bool,
    divides_gradient: bool,
) -> DividedParameter:
    """Divide a parameter, which every worker has whole.

    Args:
        parameter: The parameter.
        layout: How it is divided.
        values: Gathers whole values for the script.
        name: What errors call it.
        divides_value: Whether each worker keeps only its piece of the value.
        divides_gradient: Whether each worker gets only its piece of the gradient.
    """
    whole = parameter.detach()
    piece = nn.Parameter(layout.copy_piece(whole, values.group.rank), requires_grad=parameter.requires_grad)
    if divides_value:
        partition = Partition(layout, piece, name, values)
        divide_parameter(parameter, partition)
        values.keep(partition, whole)
    return DividedParameter(
        parameter=parameter,
        piece=piece,
        layout=layout,
        name=name,
        divides_value=divides_value,
        divides_gradient=divides_gradient,
    )


def require_elementwise(optimizer: Optimizer, *, job: str, line: str) -> None:
    """Raise `ConfigError` for an optimizer that cannot step on pieces."""
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        raise ConfigError(
            expected="with zero=, an optimizer of torch.optim that computes each element from the elements at the "
            f"same place: {', '.join(item.__name__ for item in ELEMENTWISE)}",
            found=f"{kind.__module__}.{kind.__qualname__} in job {job!r}",
            fix="omit zero=, or use one of these",
            where=line,
        )
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    for hook in hooks:
        if not type(hook).__module__.startswith("rankless."):
            raise ConfigError(
                expected=f"with zero=, no hooks on the steps of job {job!r}'s optimizer, which would see pieces of "
                "parameters",
                found=f"the hook {getattr(hook, '__qualname__', type(hook).__qualname__)}",
                fix="do its work before or after the call of the job, or omit zero=",
                where=line,
            )


@contextlib.contextmanager
def on_pieces(optimizer: Optimizer, divided: Mapping[int, DividedParameter], values: WholeValues) -> Iterator[None]:
    """Within the context, an optimizer has pieces in place of divided parameters; see Note [steps on pieces].

    Args:
        optimizer: The optimizer.
        divided: The divided parameters by the id of the parameter.
        values: Gathers whole values for the script.
    """
    rank = values.group.rank
    lists = [group["params"] for group in optimizer.param_groups]
    members = [divided[id(item)] for params in lists for item in params if id(item) in divided]
    state: dict[Any, Any] = optimizer.state
    local: defaultdict[Any, Any] = defaultdict(dict)
    for owner, entries in state.items():
        known = divided.get(id(owner))
        if known is None:
            local[owner] = entries
        else:
            local[known.piece] = {key: take_state(value, known, key, rank) for key, value in entries.items()}
    for member in members:
        member.begin_step(rank)
    optimizer.state = local
    for group, params in zip(optimizer.param_groups, lists, strict=True):
        group["params"] = [divided[id(item)].piece if id(item) in divided else item for item in params]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = params
        pieces = {id(member.piece): member for member in members}
        shown: dict[Any, Any] = {}
        for owner, entries in local.items():
            stepped = pieces.get(id(owner))
            if stepped is None:
                shown[owner] = entries
            else:
                before = state.get(stepped.parameter, {})
                shown[stepped.parameter] = {
                    key: show_state(value, before.get(key), stepped, key, values) for key, value in entries.items()
                }
        state.clear()
        state.update(shown)
        optimizer.state = state  # type: ignore[assignment]  # the script may have a reference to it
        for member in members:
            member.end_step()


def take_state(value: Any, divided: DividedParameter, key: str, rank: int) -> Any:
    """Return this worker's part of an entry of a parameter's state."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    partition = find_partition(value)
    if partition is not None:
        return partition.piece
    if tuple(value.shape) != divided.layout.shape:
        raise ConfigError(
            expected=f"optimizer state of the shape {list(divided.layout.shape)} for {divided.name}, which is divided "
            "between workers",
            found=f"{key} of the shape {list(value.shape)}",
            fix="load the state that the optimizer has saved, or omit zero=",
        )
    return divided.layout.copy_piece(value, rank)


def show_state(value: Any, before: Any, divided: DividedParameter, key: str, values: WholeValues) -> Any:
    """Return an entry of a parameter's state as the script sees it: its tensors are divided like the parameter."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    known = find_partition(before) if isinstance(before, Tensor) else None
    if known is not None and known.piece is value:
        return before
    strides = value.stride()
    order = tuple(sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim)))
    layout = PieceLayout(divided.layout.shape, order, divided.layout.placement)
    return make_partitioned_tensor(Partition(layout, value, f"{key} of {divided.name}", values))
