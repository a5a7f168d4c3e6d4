"""Operations without a tensor: barrier, and join for a rank that finishes before the others."""

from rankless.extensions.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.extensions.horovod.engine.requests import OperationKind
from rankless.extensions.horovod.torch.operations.handles import submit, synchronize

SHARED_NAME = "noname"
"""One name for all calls, so that ranks with different counts of unnamed operations match."""


def join(device: int = -1) -> int:
    """Wait until all ranks have joined, and return the rank that joined last.

    Until then this rank takes part in the others' allreduces with zeros. An Average still divides by all ranks.

    Args:
        device: Ignored. Horovod allocates the zeros on this device. Rankless allocates them where they are needed.
    """
    last_rank: int = synchronize(submit(OperationKind.JOIN, SHARED_NAME, global_process_set, dict))
    return last_rank


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called this."""
    synchronize(submit(OperationKind.BARRIER, SHARED_NAME, process_set, dict))
