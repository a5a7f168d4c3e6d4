"""Collectives at memory speed: a `torch.distributed` process group for the processes of one host.

Enters: a `torch.distributed.Store` that the processes share, and their ranks. Leaves: a process group for the functions
of `torch.distributed`, or None where the processes cannot share memory. Decision 0029 has the reasons.

The layers, from below: `memory` is the operating system's side. `signals` counts, sleeps, waits and fails. `slots`
divides the memory. `shared_reductions`, `shared_movement` and `message_transfers` are the algorithms. `operation_queue`
keeps the order. `process_group` has torch's signatures, and `prepared_calls` checks their arguments.
`group_registration` makes it known to torch.
"""

from rankless.collectives.backends.group_registration import (
    close_shared_memory_group,
    make_shared_memory_group,
    register_backend,
)
from rankless.collectives.backends.process_group import SharedMemoryProcessGroup

__all__ = [
    "SharedMemoryProcessGroup",
    "close_shared_memory_group",
    "make_shared_memory_group",
    "register_backend",
]
