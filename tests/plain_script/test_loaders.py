"""In the logical view a `DataLoader` yields the batches of one device, and draws the same random numbers.

The oracle is PyTorch's own iterator over a loader that is made anew from the same seeds.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from support.processes import on_mesh
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from rankless.collectives.desync_detection import DesyncDetector
from rankless.collectives.mesh_collectives import wait_for_all
from rankless.context.world import World
from rankless.data.batch_tree import iterate_leaves, map_leaves
from rankless.errors import RanksDiverged
from rankless.logical_view import function_handlers  # noqa: F401  # registers what tensors answer
from rankless.logical_view.tensor import DividedTensor, LogicalView
from rankless.parallel.mesh import Mesh
from rankless.plain_script.loaders import divide_batches

pytestmark = pytest.mark.slow

ROWS = 23
Make = Callable[[], DataLoader[Any]]


class Squares(Dataset[Any]):
    """Samples that draw nothing. It counts what it has read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return torch.tensor([index, index**2]), index % 3


class Noisy(Squares):
    """Samples with noise from a generator: PyTorch's, NumPy's, Python's, or one of its own. From an index on."""

    def __init__(self, kind: str, first: int = 0) -> None:
        super().__init__()
        self.kind, self.first = kind, first
        self.own = numpy.random.default_rng(3)

    def __getitem__(self, index: int) -> Any:
        value, label = super().__getitem__(index)
        if index < self.first:
            return value.double(), label
        draw = {
            "torch": lambda: torch.rand(()).item(),
            "NumPy": lambda: float(numpy.random.rand()),
            "Python": random.random,
            "own": lambda: float(self.own.random()),
        }
        return value + draw[self.kind](), label


class Named(NamedTuple):
    x: Tensor
    rows: dict[str, Tensor]


class Records(Squares):
    def __getitem__(self, index: int) -> Any:
        value, label = super().__getitem__(index)
        return Named(value, {"label": torch.tensor(label), "weight": torch.tensor(index / 7)})


class Texts(Squares):
    def __getitem__(self, index: int) -> Any:
        return {"text": f"sample {index}", "x": super().__getitem__(index)[0]}


class Ragged(Squares):
    def __getitem__(self, index: int) -> Any:
        return torch.arange(index % 5 + 1.0)


class Batched(Squares):
    """A data set that reads several samples at once."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Failing(Squares):
    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise LookupError("sample 17 is broken")
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(start, ROWS, step):
            yield torch.rand(2) + index


class ByLength(Sampler[list[int]]):
    """Batches of several sizes, in an order that it draws."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(ROWS).tolist()
        for start, size in ((0, 3), (3, 9), (12, 1), (13, 10)):
            yield order[start : start + size]

    def __len__(self) -> int:
        return 4


class Tripled(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield [leaf * 3 for leaf in batch]


def pad(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    return pad_sequence(samples, batch_first=True), torch.tensor([len(sample) for sample in samples])


def pad_in_time_order(samples: list[Tensor]) -> Tensor:
    return pad_sequence([sample[:, None] for sample in samples])


def pack(samples: list[Tensor]) -> PackedSequence:
    return pack_sequence(samples, enforce_sorted=False)


def collate_with_noise(samples: list[Any]) -> Tensor:
    return torch.stack([value for value, _ in samples]) + torch.rand(())


def collate_into_dict(samples: list[Any]) -> Any:
    return OrderedDict(x=torch.stack([value for value, _ in samples]), names=[str(label) for _, label in samples])


def seed_reader(number: int) -> None:
    numpy.random.seed(torch.initial_seed() % 2**32 + number)


def make_columns() -> TensorDataset:
    return TensorDataset(torch.arange(ROWS * 3.0).reshape(ROWS, 3), torch.arange(ROWS) % 4)


WITHOUT_PROCESSES: dict[str, Make] = {
    "columns": lambda: DataLoader(make_columns(), batch_size=5, shuffle=True),
    "columns in order": lambda: DataLoader(make_columns(), batch_size=8),
    "samples": lambda: DataLoader(Squares(), batch_size=5, shuffle=True),
    "drop_last": lambda: DataLoader(Squares(), batch_size=5, shuffle=True, drop_last=True),
    "one sample a batch": lambda: DataLoader(Squares()),
    "a last batch smaller than the ranks": lambda: DataLoader(Squares(), batch_size=11),
    "the whole data set": lambda: DataLoader(Squares(), batch_size=ROWS),
    "a generator": lambda: DataLoader(
        Squares(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "records": lambda: DataLoader(Records(), batch_size=6, shuffle=True),
    "texts": lambda: DataLoader(Texts(), batch_size=6, shuffle=True),
    "samples read together": lambda: DataLoader(Batched(), batch_size=6, shuffle=True),
    "noise of torch": lambda: DataLoader(Noisy("torch"), batch_size=5, shuffle=True),
    "noise of NumPy": lambda: DataLoader(Noisy("NumPy"), batch_size=5, shuffle=True),
    "noise of Python": lambda: DataLoader(Noisy("Python"), batch_size=5, shuffle=True),
    "noise of its own": lambda: DataLoader(Noisy("own"), batch_size=5, shuffle=True),
    "noise in the last samples": lambda: DataLoader(Noisy("torch", 19), batch_size=5),
    "noise in a sample of one rank": lambda: DataLoader(Noisy("NumPy", 22), batch_size=6),
    "weighted": lambda: DataLoader(
        Squares(), batch_size=5, sampler=WeightedRandomSampler(torch.arange(1.0, ROWS + 1), 31)
    ),
    "with replacement": lambda: DataLoader(
        Squares(), batch_size=5, sampler=RandomSampler(range(ROWS), replacement=True, num_samples=40)
    ),
    "a batch sampler": lambda: DataLoader(Squares(), batch_sampler=ByLength()),
    "PyTorch's batch sampler": lambda: DataLoader(
        Squares(), batch_sampler=BatchSampler(RandomSampler(range(ROWS)), 7, drop_last=False)
    ),
    "a stream": lambda: DataLoader(Stream(), batch_size=5),
    "a data set of batches": lambda: DataLoader(Squares(), batch_size=None),
    "padding": lambda: DataLoader(Ragged(), batch_size=6, shuffle=True, collate_fn=pad),
    "padding in time order": lambda: DataLoader(Ragged(), batch_size=6, shuffle=True, collate_fn=pad_in_time_order),
    "packing": lambda: DataLoader(Ragged(), batch_size=6, shuffle=True, collate_fn=pack),
    "noise of the collation": lambda: DataLoader(Squares(), batch_size=6, collate_fn=collate_with_noise),
    "a dict of its own": lambda: DataLoader(Squares(), batch_size=6, collate_fn=collate_into_dict),
    "a subclass": lambda: DataLoader(make_columns(), batch_size=6) and Tripled(make_columns(), batch_size=6),
    "parts of data sets": lambda: DataLoader(
        ConcatDataset([Subset(Squares(), [1, 5, 9, 2]), random_split(Squares(), [10, 13])[0]]), batch_size=5
    ),
    "memory that is page-locked": lambda: DataLoader(Squares(), batch_size=5, shuffle=True, pin_memory=True),
}
WITH_PROCESSES: dict[str, Make] = {
    "processes": lambda: DataLoader(Squares(), batch_size=5, shuffle=True, num_workers=2),
    "processes and columns": lambda: DataLoader(make_columns(), batch_size=5, shuffle=True, num_workers=1),
    "processes that persist": lambda: DataLoader(
        Squares(), batch_size=5, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "processes with noise": lambda: DataLoader(Noisy("torch"), batch_size=4, shuffle=True, num_workers=2),
    "processes with noise of one rank": lambda: DataLoader(Noisy("torch", 22), batch_size=4, num_workers=2),
    "processes that persist with noise": lambda: DataLoader(
        Noisy("torch"), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "processes with seeds": lambda: DataLoader(
        Noisy("NumPy"), batch_size=4, num_workers=2, worker_init_fn=seed_reader, prefetch_factor=3
    ),
    "processes and a stream": lambda: DataLoader(Stream(), batch_size=5, num_workers=2),
    "processes and padding": lambda: DataLoader(Ragged(), batch_size=6, collate_fn=pad, num_workers=2),
}
LOADERS = {"without": WITHOUT_PROCESSES, "with": WITH_PROCESSES}
WHOLE = (
    *("one sample a batch", "packing", "a data set of batches", "a dict of its own"),
    *("noise of the collation",),
)


def seed_all() -> None:
    torch.manual_seed(1)
    numpy.random.seed(2)
    random.seed(3)


def to_plain(batch: Any) -> Any:
    return map_leaves(lambda _, leaf: leaf.whole() if isinstance(leaf, DividedTensor) else leaf, batch)


def read_passes(loader: DataLoader[Any], divided: list[bool]) -> list[Any]:
    """Return what a script gets in three passes, of which it leaves the second, and the random numbers after them."""
    found: list[Any] = []
    for number in range(3):
        for batch in loader:
            divided.append(any(isinstance(leaf, DividedTensor) for _, leaf in iterate_leaves(batch)))
            found.append(to_plain(batch))
            found.append(torch.rand(()))  # as dropout draws
            if number == 1 and len(found) % 3 == 0:
                break
    return [*found, torch.rand(2), numpy.random.rand(), random.random()]


def compare(mesh: Mesh, group: str) -> list[str]:
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    view = LogicalView(mesh, lambda _: None)
    differing = []
    for name, make in LOADERS[group].items():
        seed_all()
        expected = read_passes(make(), [])
        seed_all()
        divided: list[bool] = []
        with divide_batches(view, world):
            found = read_passes(make(), divided)
        if repr(found) != repr(expected):
            differing.append(f"{name}: {found} instead of {expected}")
        if not any(divided) and name not in WHOLE:
            differing.append(f"{name}: divides nothing")
    return differing


@pytest.mark.parametrize(
    ("group", "workers"),
    [
        ("without", 2),
        pytest.param("without", 3, marks=pytest.mark.exhaustive),
        pytest.param("with", 2, marks=pytest.mark.exhaustive),
        pytest.param("with", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_loaders_yield_what_one_device_yields(group: str, workers: int) -> None:
    for differing in on_mesh(workers, compare, group):
        assert not differing, "\n".join(differing)


def count_reads(mesh: Mesh) -> list[list[int]]:
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    counts = []
    for dataset in (Squares(), Batched(), Noisy("torch"), Texts()):
        with divide_batches(LogicalView(mesh, lambda _: None), world):
            for _ in DataLoader(dataset, batch_size=5):
                pass
        counts.append(dataset.read)
    return counts


def test_each_rank_reads_its_own_samples() -> None:
    squares, batched, noisy, texts = zip(*on_mesh(2, count_reads), strict=True)
    for first, second in (squares, batched):
        # Both read sample 0, twice, to compare their data sets.
        assert sorted(index for index in first if index) == [1, 2, 5, 6, 7, 10, 11, 12, 15, 16, 17, 20, 21]
        assert sorted(index for index in second if index) == [3, 4, 8, 9, 13, 14, 18, 19, 22]
    assert all(set(read) == set(range(ROWS)) for read in (*noisy, *texts))


def find_divided_dims(mesh: Mesh) -> list[tuple[int, ...]]:
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    with divide_batches(LogicalView(mesh, lambda _: None), world):
        loader = DataLoader([torch.ones(5, 6)] * 11, 8, collate_fn=lambda samples: torch.stack(samples, 1))
        return [(batch.placement.dim, *batch.local.shape) for batch in loader]


def test_sequences_that_are_collated_along_the_second_dim_are_divided_there() -> None:
    assert on_mesh(2, find_divided_dims) == [[(1, 5, 4, 6), (1, 5, 2, 6)], [(1, 5, 4, 6), (1, 5, 1, 6)]]


class OfRank(Squares):
    """A data set that is not the same on all ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, self.rank])


def read_other_data(mesh: Mesh) -> str:
    compared = replace(mesh, desync_detector=DesyncDetector(mesh, notify=lambda _: None))
    world = World(mesh=compared, notify=lambda _: None, send_record=lambda _: None)
    text = ""
    seed_all()
    with divide_batches(LogicalView(compared, lambda _: None), world):
        try:
            next(iter(DataLoader(OfRank(mesh.rank), batch_size=5)))
        except RanksDiverged as error:
            text = str(error)
    wait_for_all(among=mesh)
    return text


def test_ranks_with_other_data_are_named() -> None:
    errors = on_mesh(2, read_other_data)
    assert any("rank 0: " in error and "the batch, with indices and first sample" in error for error in errors)


def fail(mesh: Mesh, processes: int) -> list[str]:
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    found = []
    with divide_batches(LogicalView(mesh, lambda _: None), world):
        loader = DataLoader(Failing(), batch_size=5, num_workers=processes)
        for _ in range(2):
            count = 0
            try:
                for _batch in loader:
                    count += 1
            except LookupError as error:
                found.append(f"{count} {'sample 17 is broken' in str(error)}")
    return found


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_an_exception_of_a_data_set_is_raised_on_all_ranks(processes: int) -> None:
    assert on_mesh(2, fail, processes) == [["3 True", "3 True"]] * 2
