"""A sampler that divides the remaining samples of an epoch among the current workers."""

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from rankless.extensions.horovod import context


class ElasticSampler(Sampler[int]):
    """Divides the unprocessed samples of an epoch among the ranks, and does so again after each reset.

    Keep it in a `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch. Every
    rank gets equally many samples. If they do not divide evenly, the first of the remaining samples are repeated.

    Args:
        dataset: Anything with a length.
        shuffle: Whether to shuffle the samples of each epoch. Default True.
        seed: The seed of the shuffling. Default 0.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch with no processed samples. Call it at the end of the previous epoch, not at the beginning."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002  # Horovod's signature
        """Record that each rank has processed a batch of `batch_size` samples."""
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of another sampler."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the number of its processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
        world = context.current().world
        self.num_replicas, self.rank = world.size, world.rank
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        indices = self.remaining_indices[:]
        while indices and len(indices) < self.total_size:  # repeats if fewer samples than ranks remain
            indices += indices[: self.total_size - len(indices)]
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
