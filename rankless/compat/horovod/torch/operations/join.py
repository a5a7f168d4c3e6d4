"""Operations without a tensor: wait for all, or be done before the others."""

from rankless.compat.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.compat.horovod.engine.requests import OperationKind
from rankless.compat.horovod.torch.operations.handles import submit, synchronize

SHARED_NAME = "noname"
"""One name for all calls: ranks that have counted other handles meet all the same."""


def join(device: int = -1) -> int:
    """The rank that joined last, once all have joined.

    Until then this rank takes part in the others' allreduces with zeros; an Average is still over all ranks. `device`
    is where Horovod makes its zeros; here they are made where they are needed.
    """
    last_rank: int = synchronize(submit(OperationKind.JOIN, SHARED_NAME, global_process_set))
    return last_rank


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once all ranks of the set have come."""
    synchronize(submit(OperationKind.BARRIER, SHARED_NAME, process_set))
