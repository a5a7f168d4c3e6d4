"""The functions of `torch.distributed`, with checks that turn hangs into errors, and what Rankless itself sends.

For scripts: the names below, and `rankless.collectives.differentiable`. They take `torch.distributed`'s arguments under
its names, `timeout` as a `datetime.timedelta` included; the additions of Rankless are keyword-only. Each function first
compares the calls of all ranks (`collective_check`).

For Rankless itself: tensors, bytes and typed values over a mesh (`mesh_collectives`, `byte_messages`,
`value_encoding`), and the comparison of whole calls between ranks (`desync_detection`). `compiler`, `jobs`, `data` and
`checkpoint` call them. Only this package, and `runtime` to make the process groups, call `torch.distributed`.
"""

from torch.distributed import ReduceOp

from rankless.collectives.broadcast_and_compare_state import broadcast_optimizer_state, broadcast_parameters
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
from rankless.collectives.reducing_collectives import (
    all_reduce,
    all_reduce_coalesced,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
)
from rankless.collectives.reducing_collectives import reduce_scatter_single as reduce_scatter_tensor

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
