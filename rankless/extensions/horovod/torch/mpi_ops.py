"""The operations, ranks and sizes, under the module name from which scripts import them.

The autograd functions are for code that calls their `apply` with Horovod's arguments.
"""

from typing import Any

import torch

from rankless.extensions.horovod.common.basics import (
    HorovodBasics,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,  # noqa: F401 - tools read it here
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from rankless.extensions.horovod.common.builds import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from rankless.extensions.horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from rankless.extensions.horovod.exceptions import HorovodInternalError
from rankless.extensions.horovod.torch import mpi_lib_v2 as mpi_lib  # noqa: F401 - tools read it here
from rankless.extensions.horovod.torch.compression import Compression
from rankless.extensions.horovod.torch.operations.allgather import (
    Allgather,
    GroupedAllgather,
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
    sparse_allreduce_async,
)
from rankless.extensions.horovod.torch.operations.allreduce import (
    Allreduce,
    GroupedAllreduce,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from rankless.extensions.horovod.torch.operations.alltoall import Alltoall, alltoall, alltoall_async
from rankless.extensions.horovod.torch.operations.broadcast import (
    Broadcast,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from rankless.extensions.horovod.torch.operations.handles import barrier, join, poll, synchronize
from rankless.extensions.horovod.torch.operations.reducescatter import (
    GroupedReducescatter,
    Reducescatter,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from rankless.extensions.horovod.torch.operations.reduction_rule import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    make_reduction_rule,
    resolve_reduction,
)

_basics = HorovodBasics()
"""Horovod's object of these functions, which tools read."""

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
"""The names of `horovod.torch` too, which takes them from here."""


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
