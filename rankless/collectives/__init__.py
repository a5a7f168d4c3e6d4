"""Tensors, objects and small typed messages between processes.

Two sides. For Rankless itself: a mesh and the tensors that move over it (`mesh`, `tensors`, `messages`, `lockstep`);
called by `program`, `checkpoint` and `views`. For scripts: the names below, which are torch.distributed's and take
its process groups, each after a roll call that turns a hang into an error (`transfers`, `reductions`, `point_to_point`,
`objects`, `handing_on`; `differentiable` is imported by name), and the sampler that goes with them (`sampling`).
Nobody
else talks to `torch.distributed`, save `runtime`, which makes the groups.
"""

from torch.distributed import ReduceOp

from rankless.collectives.broadcast_state import broadcast_optimizer_state, broadcast_parameters
from rankless.collectives.data_movement import (
    all_gather,
    all_gather_coalesced,
    all_gather_single,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    scatter,
)
from rankless.collectives.data_movement import all_gather_single as all_gather_into_tensor
from rankless.collectives.distributed_sampler import DistributedSampler
from rankless.collectives.object_collectives import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    scatter_object_list,
)
from rankless.collectives.point_to_point import P2POp, batch_isend_irecv, irecv, isend, recv, send
from rankless.collectives.reductions import (
    all_reduce,
    all_reduce_coalesced,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
)
from rankless.collectives.reductions import reduce_scatter_single as reduce_scatter_tensor

__all__ = [
    "DistributedSampler",
    "P2POp",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
]
