"""Let a script's own optimizer step on this worker's pieces of parameters.

Note [steps on pieces]: during a step, the optimizer's groups and state refer to pieces in place of divided parameters.
Otherwise they refer to the parameters, as the script expects, and the state is made of divided tensors. This is exact
for optimizers that compute each element from the elements at the same place. `ELEMENTWISE` lists PyTorch's;
tests/jobs/test_optimizers.py shows for each that a step on the whole equals a step on parts, bit by bit. Optimizers
that read whole tensors (`READS_WHOLE`) step on whole parameters, each of which belongs to one worker: its piece is the
parameter, and the others' pieces have no rows. After a step the workers exchange which state there is.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rankless.errors import ConfigError
from rankless.ownership.divided_parameter import DividedParameter
from rankless.ownership.partitioned_tensor import (
    Partition,
    WholeValues,
    find_partition,
    make_partitioned_tensor,
)
from rankless.ownership.piece_layout import PieceLayout, order_dims

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
READS_WHOLE: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)
"""The optimizers that step on one parameter at a time, and read the whole of it."""


def list_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [item for group in optimizer.param_groups for item in group["params"]]


def require_divisible(optimizer: Optimizer, *, job: str, line: str) -> None:
    """Raise `ConfigError` for an optimizer that can step neither on pieces nor on one parameter at a time."""
    kind, known = type(optimizer), (*ELEMENTWISE, *READS_WHOLE)
    if kind not in known:
        raise ConfigError(
            expected="where workers divide parameters (zero=, a pipeline, heterogeneous workers), an optimizer of "
            "torch.optim that steps on each element or each tensor by itself: "
            f"{', '.join(item.__name__ for item in known)}",
            found=f"{kind.__module__}.{kind.__qualname__} in job {job!r}",
            fix="use one of these, or a run that does not divide parameters",
            where=line,
        )
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    for hook in hooks:
        if not type(hook).__module__.startswith("rankless."):
            raise ConfigError(
                expected=f"no hooks on the steps of job {job!r}'s optimizer, which would see pieces of parameters "
                "where workers divide them",
                found=f"the hook {getattr(hook, '__qualname__', type(hook).__qualname__)}",
                fix="do its work before or after the call of the job, or use a run that does not divide parameters",
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
        elif known.has_rows(rank):
            local[known.piece] = {key: take_state(value, known, key, rank) for key, value in entries.items()}
    for member in members:
        member.begin_step(rank)
    optimizer.state = local
    for group, params in zip(optimizer.param_groups, lists, strict=True):
        found = [divided.get(id(item)) for item in params]
        pairs = [pair for pair in zip(params, found, strict=True) if pair[1] is None or pair[1].has_rows(rank)]
        group["params"] = [item if known is None else known.piece for item, known in pairs]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = params
        pieces = {id(member.piece): member for member in members}
        # Workers without rows of a parameter get its state from the one that has them: see `share_state`.
        elsewhere = [member.parameter for member in members if not member.has_rows(rank)]
        shown: dict[Any, Any] = {parameter: state[parameter] for parameter in elsewhere if parameter in state}
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
    if divided.is_owned:
        return value.clone() if hasattr(value, "was_divided") else value
    if tuple(value.shape) != divided.layout.shape:
        raise ConfigError(
            expected=f"optimizer state of the shape {list(divided.layout.shape)} for {divided.name}, which is divided "
            "between workers",
            found=f"{key} of the shape {list(value.shape)}",
            fix="load the state that the optimizer has saved, or omit zero=",
        )
    return divided.place(divided.layout.copy_piece(value, rank))


def show_state(value: Any, before: Any, divided: DividedParameter, key: str, values: WholeValues) -> Any:
    """Return an entry of a parameter's state as the script sees it: its tensors are divided like the parameter."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    known = find_partition(before) if isinstance(before, Tensor) else None
    if known is not None and known.piece is value:
        return before
    # Where dims have one row, the order of dims cannot be told from a worker's piece; all must have the same.
    layout = divided.own(tuple(value.shape), order_dims(value.stride())) if divided.is_owned else divided.layout
    return make_partitioned_tensor(
        Partition(layout, value, f"{key} of {divided.name}", values, device=divided.parameter.device), before
    )


def find_state_layout(shape: tuple[int, ...], divided: DividedParameter) -> PieceLayout | None:
    """Return how an entry of a parameter's state is divided, like the parameter; None for one of another shape.

    Args:
        shape: The shape of the whole entry.
        divided: The parameter.
    """
    layout = divided.layout
    if not shape or (not divided.is_owned and shape != layout.shape):
        return None
    order = layout.order if shape == layout.shape else tuple(range(len(shape)))
    return divided.own(shape, order) if divided.is_owned else PieceLayout(shape, order, layout.placement)
