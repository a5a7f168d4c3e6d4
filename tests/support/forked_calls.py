"""A process that a rank forks calls the rank's group."""

import os
from typing import Any

import torch
import torch.distributed as dist

from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh


def use_in_a_fork(group: Any, mesh: Mesh) -> tuple[int, float]:
    """Let a child of each rank call a group and destroy it; the ranks then use it on.

    Return the child's exit code, which is 0 if its call was refused, and a sum over the ranks.
    """
    dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            dist.all_reduce(torch.ones(3), group=group)
        except CollectiveError as error:
            code = 0 if "it has forked" in str(error) else 2
        group.abort()
        group.shutdown()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    dist.barrier(group=mesh.group)
    values = torch.ones(3)
    dist.all_reduce(values, group=group)
    return os.waitstatus_to_exitcode(status), float(values[0])
