"""A sampler that gives every rank other samples: torch's DistributedSampler, without samples that come twice.

Note [nothing twice]: torch's sampler repeats samples until all ranks have equally many. A metric summed over the ranks
then counts some samples twice, and training weighs them double. Here each sample comes once, so that ranks may have one
sample more than others, and, where the batch size divides what a rank has, one batch more. What waits for all ranks in
each step, DistributedDataParallel say, would wait for ever in that batch: see docs/guides/collectives.md.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler as TorchSampler

from rankless.collectives.process_groups import notify
from rankless.config import environment
from rankless.errors import ConfigError
from rankless.user_code import caller_line


class DistributedSampler(TorchSampler[int]):
    """This rank's indices of `dataset`, for DataLoader(sampler=…): all ranks' together are each index once.

    Arguments and order are those of torch.utils.data.DistributedSampler: call `set_epoch` before each pass, and each
    has an order of its own. But no sample comes twice, so ranks may have one more than others. With `drop_last=True`
    so many are left out that all have equally many, with `padding=True` so many are repeated, both index by index as
    in torch. `num_replicas` and `rank` are those of the joined job, unless given; alone 1 and 0. The data set keeps
    the length that it has now. Raises ConfigError for what cannot be meant.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        padding: bool = False,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                expected="a data set with a length: a sampler gives indices below it",
                found=f"{type(dataset).__name__} without __len__",
                fix="define __len__; a stream takes no sampler: let its __iter__ leave out what is for other ranks",
            )
        if num_replicas is None or rank is None:
            checked = _find_rank_and_world_size()
            rank = checked[0] if rank is None else rank
            num_replicas = checked[1] if num_replicas is None else num_replicas
        self.num_replicas = _whole("num_replicas", num_replicas, least=1)
        self.rank = _whole("rank", rank, least=0)
        if self.rank >= self.num_replicas:
            raise ConfigError(
                expected=f"a rank below num_replicas, from 0 to {self.num_replicas - 1}",
                found=f"rank={rank}",
                fix="leave both away: they are then those of the job that this process has joined",
            )
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = _whole("seed", seed, least=None)
        self.drop_last = drop_last
        self.padding = padding
        self.epoch = 0
        self.warned_same_epoch = False
        """Whether it has been said that `set_epoch` was forgotten. Set it where the same order is wanted every time."""
        self.total_size = self._count = len(dataset)
        """The samples of all ranks together, those that are repeated counted again."""
        if drop_last or padding:
            rounded = self._count if drop_last else self._count + self.num_replicas - 1
            self.total_size = rounded // self.num_replicas * self.num_replicas
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))
        """This rank's samples."""
        self._epoch_done: int | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        if self.shuffle and self._epoch_done == self.epoch:
            self._warn_same_epoch()
        return self._yield_indices(self._indices(), self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass have the order of that epoch: before each pass over the loader, on every rank."""
        self.epoch = _whole("epoch", epoch, least=0)

    def _indices(self) -> list[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self._count, generator=generator)
        else:
            order = torch.arange(self._count)
        places = torch.arange(self.total_size)[self.rank :: self.num_replicas]
        # Those that are repeated come again from the first on.
        chosen: list[int] = order[places % max(self._count, 1)].tolist()
        return chosen

    def _yield_indices(self, indices: list[int], epoch: int) -> Iterator[int]:
        yield from indices
        self._epoch_done = epoch

    def _warn_same_epoch(self) -> None:
        if self.rank == 0 and not self.warned_same_epoch:
            notify(
                f"{caller_line()}: a second pass in the order of the first, epoch {self.epoch}: call "
                "sampler.set_epoch(epoch) before each pass over the loader, on every rank (said once)"
            )
        self.warned_same_epoch = True


def _find_rank_and_world_size() -> tuple[int, int]:
    """This process's rank and how many there are. Raises ConfigError where a launcher says that there are more."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    received = environment.read_worker_config() or environment.read_horovod_worker() or environment.read_torchrun()
    if received is not None and received.world_size > 1:
        raise ConfigError(
            expected="a process that has joined its job before its sampler is made",
            found=f"one of {received.world_size} that the launcher has started, without a process group",
            fix="call rankless.init() first, or pass num_replicas= and rank=",
        )
    return 0, 1


def _whole(name: str, value: Any, *, least: int | None) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise ConfigError(
            expected=f"{name}= as a whole number" + ("" if least is None else f" of at least {least}"),
            found=f"{name}={value!r}",
            fix=f"pass such a number, or leave {name}= away" if name != "epoch" else "count epochs from 0",
        )
    return number
