"""Collectives at memory speed: a `torch.distributed` process group for the processes of one host.

Enters: a `torch.distributed.Store` that the processes share, and their ranks. Leaves: a process group for the functions
of `torch.distributed`, or None where the processes cannot share memory. Decision 0029 has the reasons.

The layers, from below: `shared_memory_mapping` maps memory that the ranks share, which they find through
`store_exchange`, and `peer_liveness` sees which have ended. `futex_signals` counts, sleeps, waits and fails.
`double_buffered_slots` divides the memory. `shared_reductions`, `shared_copying_collectives` and `message_transfers`
are the algorithms. `operation_queue` keeps the order. `process_group` has torch's signatures and makes the group known
to torch. `argument_conversion` checks the arguments. `hosts` has the groups of several hosts, which reduce within each
host in this memory first.
"""

from rankless.collectives.backends.process_group import (
    SharedMemoryProcessGroup,
    close_shared_memory_group,
    make_shared_memory_group,
    register_backend,
)

__all__ = [
    "SharedMemoryProcessGroup",
    "close_shared_memory_group",
    "make_shared_memory_group",
    "register_backend",
]
