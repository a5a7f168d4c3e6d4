"""The autograd functions of Horovod's `mpi_ops`, for code that calls their `apply` with Horovod's arguments."""

from typing import Any

import torch

from rankless.extensions.horovod.common.process_sets import ProcessSet
from rankless.extensions.horovod.torch.operations.allgather import Allgather, GroupedAllgather
from rankless.extensions.horovod.torch.operations.allreduce import Allreduce, GroupedAllreduce
from rankless.extensions.horovod.torch.operations.alltoall import Alltoall
from rankless.extensions.horovod.torch.operations.broadcast import Broadcast
from rankless.extensions.horovod.torch.operations.reducescatter import GroupedReducescatter, Reducescatter
from rankless.extensions.horovod.torch.operations.reduction_rule import make_reduction_rule, resolve_reduction

HorovodAllgather = Allgather
HorovodGroupedAllgather = GroupedAllgather
HorovodBroadcast = Broadcast
HorovodAlltoall = Alltoall


class HorovodAllreduce(torch.autograd.Function):
    """An allreduce: `apply(tensor, average, name, op, prescale_factor, postscale_factor, process_set)`."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        average: bool | None,
        name: str | None,
        op: int | None,
        *factors_and_set: Any,
    ) -> torch.Tensor:
        """Return the combined values in a new tensor."""
        return Allreduce.forward(
            ctx, tensor, name, make_reduction_rule(resolve_reduction(op, average), *factors_and_set)
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient, combined by the same rule."""
        return (Allreduce.backward(ctx, gradient)[0], *(None,) * 6)


class HorovodGroupedAllreduce(torch.autograd.Function):
    """A grouped allreduce: `apply(average, name, op, prescale_factor, postscale_factor, process_set, *tensors)`."""

    @staticmethod
    def forward(
        ctx: Any,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        *set_and_tensors: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return the combined values in new tensors."""
        process_set, *tensors = set_and_tensors
        reduction = resolve_reduction(op, average)
        rule = make_reduction_rule(reduction, prescale_factor, postscale_factor, process_set)
        return GroupedAllreduce.forward(ctx, name, rule, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, combined by the same rule."""
        return (*(None,) * 6, *GroupedAllreduce.backward(ctx, *gradients)[2:])


class HorovodReducescatter(torch.autograd.Function):
    """A reducescatter: `apply(tensor, name, op, process_set, prescale_factor, postscale_factor)`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet, *factors: float
    ) -> torch.Tensor:
        """Return this rank's rows of the combined tensor."""
        prescale_factor, postscale_factor = factors
        rule = make_reduction_rule(op, prescale_factor, postscale_factor, process_set)
        return Reducescatter.forward(ctx, tensor, name, rule)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return all ranks' gradients, concatenated."""
        return (Reducescatter.backward(ctx, gradient)[0], *(None,) * 5)


class HorovodGroupedReducescatter(torch.autograd.Function):
    """A grouped reducescatter: `apply(name, op, process_set, prescale_factor, postscale_factor, *tensors)`."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return this rank's rows of each combined tensor."""
        rule = make_reduction_rule(op, prescale_factor, postscale_factor, process_set)
        return GroupedReducescatter.forward(ctx, name, rule, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return, for each tensor, all ranks' gradients, concatenated."""
        return (*(None,) * 5, *GroupedReducescatter.backward(ctx, *gradients)[2:])
