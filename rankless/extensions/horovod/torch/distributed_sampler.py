"""`hvd.DistributedSampler`, which some scripts use although Horovod itself has none."""

from typing import Any

from rankless.collectives.distributed_sampler import DistributedSampler as RanklessSampler
from rankless.extensions.horovod.common.basics import rank, size


class DistributedSampler(RanklessSampler):
    """torch's DistributedSampler with the same indices. The defaults are `hvd.size()` and `hvd.rank()`.

    Every rank gets equally many samples, with repetitions if necessary: in a Horovod loop each step waits for all
    ranks.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        replica_rank = _rank() if rank is None else rank
        replica_count = size() if num_replicas is None else num_replicas
        super().__init__(dataset, replica_count, replica_rank, shuffle, seed, drop_last, padding=not drop_last)


_rank = rank
