"""Data sets, samplers and loaders as users write them. Each case works with `DataLoader` and with our loader."""

import dataclasses
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from rankless.collectives.value_encoding import decode_value, encode_value
from rankless.context.world import World
from rankless.data.loader import Loader, LoaderOptions
from rankless.data.logical_tensor import LogicalTensor
from rankless.data.random_generators import get_process_states, set_process_states
from rankless.parallel.mesh import Mesh

Pair = namedtuple("Pair", "number text")


@dataclasses.dataclass(frozen=True)
class Item:
    number: Any
    names: Any


class Items(Dataset[Any]):
    """Samples without randomness: numbers, texts, arrays, nested and named tuples."""

    def __init__(self, rows: int = 23) -> None:
        self.rows = rows
        self.offset = 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = int(index) + self.offset
        return {
            "x": torch.tensor([number, number * number], dtype=torch.float64),
            "array": numpy.full((2,), number, dtype=numpy.float32),
            "name": f"sample {number}",
            "pair": Pair(number, str(number)),
            "nested": (number / 2, [number, {"path": f"{number}.png"}]),
        }


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Any, str]:
        return torch.tensor(index), f"text {index}"


class Noisy(Dataset[Any]):
    """Each sample draws from all three generators of the process and from one of its own."""

    def __init__(self) -> None:
        self.generator = numpy.random.default_rng(3)

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return index, torch.rand(2), float(numpy.random.rand()), random.random(), float(self.generator.random())


class Batches(Dataset[Any]):
    """A data set that returns whole batches of several lengths."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.arange(index + 2) + 10 * index, "which": index}


class Ordered:
    """A sampler with given indices."""

    def __init__(self, indices: list[Any]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class YieldsTensors(Ordered):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(len(self.indices)))


class OwnGenerator(Ordered):
    def __init__(self, indices: list[Any]) -> None:
        super().__init__(indices)
        self.generator = numpy.random.default_rng(1)

    def __iter__(self) -> Iterator[Any]:
        for index in self.generator.permutation(len(self.indices)):
            yield self.indices[index]


class DrawsAtOnce(Ordered):
    def __iter__(self) -> Iterator[Any]:
        order = list(self.indices)
        random.shuffle(order)
        return iter(order)


class CountsPasses(Ordered):
    """A sampler with another order in each pass, by a counter of its own."""

    def __init__(self, indices: list[Any]) -> None:
        super().__init__(indices)
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(self.indices[self.passes :] + self.indices[: self.passes])


class SamplerWithState(CountsPasses):
    """A sampler whose state only its state_dict knows."""

    def __init__(self, indices: list[Any]) -> None:
        super().__init__(indices)
        self.seen = [0]

    def __iter__(self) -> Iterator[Any]:
        self.seen[0] += 2
        return iter(self.indices[self.seen[0] :] + self.indices[: self.seen[0]])

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen[0]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen[0] = state["seen"]


class Bucketed:
    """Batches of several lengths, in a random order."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1, 2, 3, 4], [5, 6], [7, 8, 9, 10], [11], [12, 13, 14]]
        for index in torch.randperm(5).tolist():
            yield batches[index]

    def __len__(self) -> int:
        return 5


class DrawsLate(Ordered):
    def __iter__(self) -> Iterator[Any]:
        for _ in self.indices:
            yield random.randrange(len(self.indices))


class Stream(IterableDataset[Any]):
    """Shuffles through a buffer, as streams do; reader processes divide it."""

    def __init__(self, rows: int = 23, *, draws: bool = True) -> None:
        self.rows = rows
        self.draws = draws

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        buffer: list[int] = []
        for number in range(first, self.rows, step):
            buffer.append(number)
            if len(buffer) == 4:
                yield self.sample(buffer.pop(random.randrange(4) if self.draws else 0))
        yield from (self.sample(number) for number in buffer)

    def sample(self, number: int) -> dict[str, Any]:
        return {
            "x": torch.tensor([number]),
            "name": f"line {number}",
            "noise": numpy.random.rand() if self.draws else 0,
        }


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.rows


class StreamWithState(IterableDataset[Any]):
    """A stream with state_dict that counts what it reads."""

    def __init__(self) -> None:
        self.at = 0
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 19:
            self.at += 1
            self.read += 1
            yield torch.tensor([self.at])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StreamDrawsLate(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (torch.rand(1) for _ in range(9))


class StreamOfBatches(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(6):
            yield {"x": torch.full((number + 1, 2), number), "number": number}


def to_items(samples: list[Any]) -> Item:
    return Item(torch.stack([sample["x"] for sample in samples]), tuple(sample["name"] for sample in samples))


def to_dicts(samples: list[Any]) -> dict[str, Any]:
    return {"x": torch.stack([sample["x"] for sample in samples]), "ids": [sample["pair"].number for sample in samples]}


def shift_dataset(_: int) -> None:
    get_worker_info().dataset.offset = 100


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(8)


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(46.0).reshape(23, 2), torch.arange(23))


Case = Callable[[], tuple[Any, dict[str, Any]]]

CASES: dict[str, Case] = {
    "weighted": lambda: (numbers(), {"batch_size": 5, "sampler": WeightedRandomSampler([0.1, 0.5, 2.0] * 7, 17)}),
    "subset": lambda: (Items(), {"batch_size": 4, "sampler": SubsetRandomSampler([2, 3, 5, 7, 11, 13, 17])}),
    "replacement": lambda: (
        numbers(),
        {"batch_size": 9, "sampler": RandomSampler(range(23), True, 70, generator=generator())},
    ),
    "own generator": lambda: (Items(), {"batch_size": 5, "sampler": OwnGenerator(list(range(19)))}),
    "tensors as indices": lambda: (Items(), {"batch_size": 5, "sampler": YieldsTensors(list(range(13)))}),
    "draws at once": lambda: (Items(), {"batch_size": 5, "sampler": DrawsAtOnce(list(range(13)))}),
    "counts passes": lambda: (Items(), {"batch_size": 5, "sampler": CountsPasses(list(range(13)))}),
    "sampler with state": lambda: (Items(), {"batch_size": 5, "sampler": SamplerWithState(list(range(13)))}),
    "batch sampler": lambda: (Items(), {"batch_sampler": Bucketed()}),
    "list of batches": lambda: (Texts(), {"batch_sampler": [[0, 1, 2], [3], [4, 5, 6, 7], [10, 9, 8]]}),
    "generator": lambda: (Items(), {"batch_size": 6, "shuffle": True, "generator": generator()}),
    "shuffled": lambda: (numbers(), {"batch_size": 6, "shuffle": True, "drop_last": True}),
    "texts": lambda: (Texts(), {"batch_size": 4, "shuffle": True}),
    "data class": lambda: (Items(), {"batch_size": 6, "collate_fn": to_items}),
    "lists": lambda: (Items(), {"batch_size": 6, "collate_fn": to_dicts, "shuffle": True}),
    "whole batches": lambda: (Batches(), {"batch_size": None, "shuffle": True}),
}
"""Each case returns a new data set and new options of `DataLoader`."""

READER_CASES: dict[str, Case] = {
    "readers": lambda: (
        Items(),
        {"batch_size": 5, "shuffle": True, "num_workers": 2, "prefetch_factor": 1, "worker_init_fn": shift_dataset},
    ),
    "persistent readers": lambda: (
        Items(),
        {"batch_size": 5, "shuffle": True, "num_workers": 1, "persistent_workers": True, "timeout": 30},
    ),
    "batch sampler in readers": lambda: (Items(), {"batch_sampler": Bucketed(), "num_workers": 1}),
}

STREAM_CASES: dict[str, Case] = {
    "stream": lambda: (Stream(), {"batch_size": 5}),
    "stream without a tail": lambda: (Stream(), {"batch_size": 5, "drop_last": True}),
    "measured stream": lambda: (SizedStream(20), {"batch_size": 5}),
    "stream in lists": lambda: (Stream(draws=False), {"batch_size": 6, "collate_fn": list_names}),
    "stream with state": lambda: (StreamWithState(), {"batch_size": 4}),
    "stream of batches": lambda: (StreamOfBatches(), {"batch_size": None}),
}

STREAM_READER_CASES: dict[str, Case] = {
    "stream in readers": lambda: (Stream(), {"batch_size": 4, "num_workers": 2}),
    "stream in persistent readers": lambda: (
        Stream(draws=False),
        {"batch_size": 4, "num_workers": 1, "persistent_workers": True},
    ),
}

ALL_CASES = CASES | READER_CASES | STREAM_CASES | STREAM_READER_CASES


def list_names(samples: list[Any]) -> tuple[Any, list[str]]:
    return torch.cat([sample["x"] for sample in samples]), [sample["name"] for sample in samples]


def loader_on(mesh: Mesh, dataset: Any, **options: Any) -> Loader:
    world = World(mesh=mesh, notify=print, send_record=print)
    return Loader(dataset, options=LoaderOptions(**options), world=lambda: world)


def freeze(value: Any) -> Any:
    """Return a batch that `==` compares: whole, with its types by name."""
    if isinstance(value, LogicalTensor):
        value = value.whole()
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if dataclasses.is_dataclass(value):
        return type(value).__name__, freeze(vars(value))
    if isinstance(value, dict):
        return {key: freeze(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [freeze(part) for part in value]
    return value


def seed_all_generators() -> None:
    torch.manual_seed(5)
    numpy.random.seed(5)
    random.seed(5)


def draw_numbers() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(numpy.random.rand()), random.random()


def read_passes(loader: Any, count: int = 3) -> list[Any]:
    """Read passes over a loader in a script that draws torch's numbers at every batch, as dropout does."""
    found = []
    for _ in range(count):
        batches = []
        for batch in loader:
            batches.append((freeze(batch), torch.rand(1).item()))
        found.append((batches, draw_numbers()))
    return found


def read_plain_passes(case: str, count: int = 3) -> list[Any]:
    seed_all_generators()
    dataset, options = ALL_CASES[case]()
    return read_passes(DataLoader(dataset, **options), count)


def read_our_passes(mesh: Mesh, case: str, reading: str, count: int = 3) -> list[Any]:
    seed_all_generators()
    dataset, options = ALL_CASES[case]()
    return read_passes(loader_on(mesh, dataset, reading=reading, **options), count)


def interrupt(mesh: Mesh, case: str, reading: str, batches: int) -> bytes:
    """Read one pass and some batches of the next. Return the states of the loader and of the generators."""
    seed_all_generators()
    dataset, options = ALL_CASES[case]()
    loader = loader_on(mesh, dataset, reading=reading, **options)
    read_passes(loader, 1)
    if batches == 0:
        return encode_value((loader.state_dict(), get_process_states()))
    for number, _ in enumerate(loader, start=1):
        torch.rand(1)
        if number == batches:
            return encode_value((loader.state_dict(), get_process_states()))
    raise AssertionError("the pass ended before the interruption")


def resume(mesh: Mesh, case: str, reading: str, saved: bytes) -> tuple[list[Any], int]:
    """Return the rest of the interrupted script in a fresh state: the rest of its second pass, and a third one."""
    torch.manual_seed(99)
    random.seed(99)
    numpy.random.seed(99)
    dataset, options = ALL_CASES[case]()
    loader = loader_on(mesh, dataset, reading=reading, **options)
    state, generators = decode_value(saved)
    loader.load_state_dict(state)
    set_process_states(generators)
    position = loader.position
    return read_passes(loader, 2), position
