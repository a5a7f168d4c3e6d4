"""A sampler that gives every rank other samples: torch's DistributedSampler without repeated samples.

Note [no repeated samples]: torch's sampler repeats samples until all ranks have equally many. A metric summed over the
ranks then counts some samples twice, and training weighs them double. Here each sample comes once. So a rank may have
one sample more than another, and one batch more if the batch size divides the smaller number. A step that waits for all
ranks, as with DistributedDataParallel, would wait for ever in that batch: see docs/guides/collectives.md.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler as TorchSampler

from rankless.collectives.checked_process_group import notify
from rankless.config import environment
from rankless.errors import ConfigError
from rankless.user_code import caller_line


class DistributedSampler(TorchSampler[int]):
    """The indices of this rank's samples, for `DataLoader(sampler=...)`. All ranks together have each index once.

    Arguments and order are those of `torch.utils.data.DistributedSampler`, but no sample is repeated, so ranks may have
    one sample more than others. Call `set_epoch` before each pass, or all passes have one order.

    Args:
        dataset: A data set with a length. The sampler keeps the length that the data set has now.
        num_replicas: Number of ranks. Default: that of the joined job; 1 without a job.
        rank: This rank. Default: that of the joined job; 0 without a job.
        shuffle: Whether to shuffle the indices. Default: True.
        seed: Seed of the order, the same on all ranks. Default: 0.
        drop_last: Whether to drop samples until all ranks have equally many, as torch's sampler does. Default: False.
        padding: Whether to repeat samples until all ranks have equally many, as torch's sampler does. Default: False.

    Attributes:
        num_samples (int): Number of this rank's samples.
        total_size (int): Number of all ranks' samples; repeated ones count again.

    Raises:
        ConfigError: The data set has no length, a number is invalid, or a launched process has not joined its job.

    Example:
        >>> sampler = collectives.DistributedSampler(range(5), num_replicas=2, rank=1, shuffle=False)
        >>> list(sampler)
        [1, 3]
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
                expected="a data set with a length, because a sampler gives indices below it",
                found=f"{type(dataset).__name__} without __len__",
                fix="define __len__; a stream takes no sampler, so let its __iter__ skip the samples of other ranks",
            )
        if num_replicas is None or rank is None:
            checked = _find_rank_and_world_size()
            rank = checked[0] if rank is None else rank
            num_replicas = checked[1] if num_replicas is None else num_replicas
        self.num_replicas = _require_integer("num_replicas", num_replicas, least=1)
        self.rank = _require_integer("rank", rank, least=0)
        if self.rank >= self.num_replicas:
            raise ConfigError(
                expected=f"a rank below num_replicas, from 0 to {self.num_replicas - 1}",
                found=f"rank={rank}",
                fix="leave both out; the sampler then uses those of the joined job",
            )
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = _require_integer("seed", seed, least=None)
        self.drop_last = drop_last
        self.padding = padding
        self.epoch = 0
        self.warned_same_epoch = False
        """Whether the sampler has warned of a missing `set_epoch`. Set it to True to use one order in all passes."""
        self.total_size = self._count = len(dataset)
        """Number of all ranks' samples; repeated ones count again."""
        if drop_last or padding:
            rounded = self._count if drop_last else self._count + self.num_replicas - 1
            self.total_size = rounded // self.num_replicas * self.num_replicas
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))
        """Number of this rank's samples."""
        self._epoch_done: int | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        if self.shuffle and self._epoch_done == self.epoch:
            self._warn_same_epoch()
        return self._yield_indices(self._indices(), self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Give the next pass the order of this epoch. Call it before each pass, on every rank.

        Args:
            epoch: The number of the epoch, from 0.

        Raises:
            ConfigError: `epoch` is not a whole number of at least 0.

        Example:
            >>> sampler = collectives.DistributedSampler(range(5))
            >>> sampler.set_epoch(1)
        """
        self.epoch = _require_integer("epoch", epoch, least=0)

    def _indices(self) -> list[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self._count, generator=generator, device="cpu")
        else:
            order = torch.arange(self._count, device="cpu")
        positions = torch.arange(self.total_size, device="cpu")[self.rank :: self.num_replicas]
        # Repeated samples are the first ones.
        chosen: list[int] = order[positions % max(self._count, 1)].tolist()
        return chosen

    def _yield_indices(self, indices: list[int], epoch: int) -> Iterator[int]:
        yield from indices
        self._epoch_done = epoch

    def _warn_same_epoch(self) -> None:
        if self.rank == 0 and not self.warned_same_epoch:
            notify(
                f"{caller_line()}: this pass has the order of the pass before it, epoch {self.epoch}: call "
                "sampler.set_epoch(epoch) before each pass over the loader, on every rank (warned once)"
            )
        self.warned_same_epoch = True


def _find_rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and world size. Raises `ConfigError` for a launched process that has not joined."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launched = environment.read_worker_config() or environment.read_launched_worker() or environment.read_torchrun()
    if launched is not None and launched.world_size != 1:
        raise ConfigError(
            expected="a process that joins its job before it makes a sampler",
            found=f"one of {launched.world_size or 'several'} processes of a launcher, without a process group",
            fix="call rankless.init() first, or pass num_replicas= and rank=",
        )
    return 0, 1


def _require_integer(name: str, value: Any, *, least: int | None) -> int:
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
            fix=f"pass such a number, or leave {name}= out" if name != "epoch" else "count epochs from 0",
        )
    return number
