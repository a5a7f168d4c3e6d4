"""The operations of one process set in a process group of `rankless.collectives.backends`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from rankless.collectives.backends.hosts.process_group import HierarchicalProcessGroup
from rankless.collectives.backends.process_group import SharedMemoryProcessGroup
from rankless.errors import CollectiveError
from rankless.extensions.horovod.engine.backends.process_group import REDUCE_OPS
from rankless.extensions.horovod.engine.requests import ReduceOpCode
from rankless.extensions.horovod.engine.scaling import ScaledReduction, scale_in_place


class SharedMemoryBackend:
    """The collectives of one process set whose ranks share a host, or hosts. All tensors are contiguous, on the CPU.

    All methods raise `CollectiveError` if another rank ends, leaves or is late, and then on all ranks.

    Args:
        group: What the ranks have opened together. `close` closes it.
    """

    def __init__(self, group: SharedMemoryProcessGroup) -> None:
        self._group = group
        self._index, self._size = group.rank(), group.size()
        self._is_hierarchical = isinstance(group, HierarchicalProcessGroup)
        self.name = "HIERARCHICAL" if self._is_hierarchical else "SHARED_MEMORY"
        """The backend's name in a timeline."""

    def allreduce(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], reduction: ScaledReduction
    ) -> None:
        """Combine the inputs of all ranks into the outputs. All have the same dtype."""
        operation, finish = _choose_operation(inputs[0].dtype, reduction)
        with self._abort_if_it_fails():
            self._group.all_reduce_fused(inputs, outputs, operation, before=reduction.apply_prescale, after=finish)

    def reducescatter(self, tensor: torch.Tensor, reduction: ScaledReduction) -> torch.Tensor:
        """Combine the tensors of all ranks, and return this rank's rows. The first ranks get one row more."""
        rows, remainder = divmod(tensor.shape[0], self._size)
        scaled = tensor if reduction.prescale == 1.0 else reduction.apply_prescale(tensor.clone())
        parts = list(scaled.split([rows + (index < remainder) for index in range(self._size)]))
        output = torch.empty_like(parts[self._index])
        operation, finish = _choose_operation(tensor.dtype, reduction)
        options = dist.ReduceScatterOptions()
        options.reduceOp = operation
        self._run(self._group.reduce_scatter, [output], [parts], options)
        finish(output)
        return output

    def allgather(self, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the tensors of all ranks, concatenated. `rows[i]` is the number of rows of the rank at index i."""
        output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        self._run(self._group.allgather, [list(output.split(list(rows)))], [tensor], AllgatherOptions())
        return output

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the values of the rank at index `root` into every rank's tensor."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._run(self._group.broadcast, [tensor], options)

    def alltoall(self, tensor: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> torch.Tensor:
        """Return the rows from all ranks, in their order. The arguments are the row counts for and from each rank."""
        output = tensor.new_empty((sum(received_rows), *tensor.shape[1:]))
        options = AllToAllOptions()
        self._run(self._group.all_to_all_single, output, tensor, list(received_rows), list(sent_rows), options)
        return output

    def close(self, *, is_stuck: bool = False) -> None:
        """Leave the group. A thread of this rank that waits in it gets an error."""
        if is_stuck and self._is_hierarchical:
            self._group.abort()  # its connections would wait for their timeout
        self._group.shutdown()

    def _run(self, collective: Callable[..., Any], *arguments: Any) -> None:
        """Run a collective in this thread. The last argument is its options."""
        arguments[-1].asyncOp = False
        with self._abort_if_it_fails():
            collective(*arguments)

    @contextmanager
    def _abort_if_it_fails(self) -> Iterator[None]:
        """End the group on all ranks if an operation fails: this rank may be the only one that knows of it."""
        try:
            yield
        except CollectiveError:
            self._group.abort()
            raise


def _choose_operation(
    dtype: torch.dtype, reduction: ScaledReduction
) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the group's operation, and what then remains to be done with its result."""
    if reduction.reduction is ReduceOpCode.AVERAGE and dtype.is_floating_point:
        return dist.ReduceOp.AVG, lambda values: scale_in_place(values, reduction.postscale)
    return REDUCE_OPS[reduction.reduction], reduction.finish
