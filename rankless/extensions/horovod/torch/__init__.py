"""Horovod's API for PyTorch: `import horovod.torch as hvd`."""

from rankless.extensions.horovod.torch import elastic, mpi_ops
from rankless.extensions.horovod.torch.distributed_sampler import DistributedSampler
from rankless.extensions.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from rankless.extensions.horovod.torch.mpi_ops import *  # noqa: F403 - its names are listed once, there
from rankless.extensions.horovod.torch.optimizer import DistributedOptimizer
from rankless.extensions.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "DistributedSampler",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
]
__all__ += mpi_ops.__all__
