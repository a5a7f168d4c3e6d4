"""Data sets of `read_on_cpu_workers`."""

import dataclasses
import random
from typing import NamedTuple

import numpy
import torch

SIZE = 23
drawn = torch.Generator().manual_seed(3)
NUMBERS = torch.randn(SIZE, 6, generator=drawn, dtype=torch.float64)
TARGETS = torch.randn(SIZE, generator=drawn, dtype=torch.float64)


class Pair(NamedTuple):
    """A batch as a named tuple."""

    numbers: object
    targets: object


@dataclasses.dataclass
class Named:
    """A batch as a data class."""

    numbers: object
    targets: object
    names: list


class Data(torch.utils.data.Dataset):
    """Counts its reads. With `draw` it adds noise from the process's generators."""

    def __init__(self, draw=False):
        self.reads = 0
        self.draw = draw

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        self.reads += 1
        noise = numpy.random.random() + random.random() + torch.rand(()).item() if self.draw else 0.0
        return NUMBERS[index] + noise, TARGETS[index]


class Ids(Data):
    """Has ids of rows of a table besides."""

    def __getitem__(self, index):
        self.reads += 1
        return torch.tensor([index % 7, index % 3 + 10]), NUMBERS[index], TARGETS[index]


class WholeBatches(Data):
    """Returns whole batches."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.reads += 1
        return NUMBERS[index * 5 : index * 5 + 5], TARGETS[index * 5 : index * 5 + 5]


class Drawing(torch.utils.data.Sampler):
    """Draws each index when it is asked for it."""

    def __iter__(self):
        for _ in range(SIZE):
            yield int(torch.randint(SIZE, ())) if random.random() < 0.7 else numpy.random.randint(SIZE)

    def __len__(self):
        return SIZE


class Failing(Data):
    """Has a sample that cannot be read, after some batches."""

    def __getitem__(self, index):
        if index == 17:
            raise ValueError("sample 17 is damaged")
        return super().__getitem__(index)
