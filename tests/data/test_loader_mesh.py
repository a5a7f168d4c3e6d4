"""On a mesh the concatenated batches of a loader equal those of one worker, and each rank reads its own rows."""

from typing import Any

import numpy
import pytest
import torch
from support.processes import on_mesh
from torch.utils.data import DataLoader, Dataset, TensorDataset

from rankless.context.world import World
from rankless.data.loader import Loader, LoaderOptions
from rankless.data.logical_tensor import LogicalTensor
from rankless.errors import DataError
from rankless.parallel.mesh import Mesh

pytestmark = pytest.mark.slow


class Noisy(Dataset[Any]):
    """Samples that draw random numbers; the data set records which indices were read."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {"index": index, "pair": (torch.rand(2), numpy.random.rand(3))}


class Named(Noisy):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"name": f"sample {index}"}


class BrokenOnOneRank(Noisy):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise OSError("disk gone")
        return super().__getitem__(index)


def loader_on(mesh: Mesh, dataset: Any, **options: Any) -> Loader:
    world = World(mesh=mesh, notify=print, send_record=print)
    return Loader(dataset, options=LoaderOptions(**options), world=lambda: world)


def to_lists(value: Any) -> Any:
    """Return the same containers with lists of numbers in place of tensors."""
    if isinstance(value, LogicalTensor):
        return value.whole().tolist()
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: to_lists(part) for key, part in value.items()}
    return [to_lists(part) for part in value] if isinstance(value, list | tuple) else value


def read_epochs(loader: Loader, count: int = 2) -> list[Any]:
    torch.manual_seed(11)
    numpy.random.seed(11)
    return [[to_lists(batch) for batch in loader] for _ in range(count)]


def read_noisy_epochs(mesh: Mesh, rows: int, options: dict[str, Any]) -> tuple[Any, list[int], float]:
    dataset = Noisy(rows)
    result = read_epochs(loader_on(mesh, dataset, **options))
    return result, dataset.read, torch.rand(1).item()


def describe_first_leaves(mesh: Mesh, rows: int, options: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return for each batch of indices its type, whole shape and this rank's rows."""
    found = []
    for batch in loader_on(mesh, Noisy(rows), **options):
        leaf = batch["index"]
        rows_here = leaf.local if isinstance(leaf, LogicalTensor) else leaf
        found.append((type(leaf).__name__, tuple(leaf.shape), rows_here.tolist()))
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True, "seed": 3},
        {"shuffle": True},
        {"drop_last": True, "seed": -1},
        {"shuffle": True, "reading": "replicated"},
        {"shuffle": True, "num_workers": 1, "seed": 3},
    ],
    ids=["seed", "no seed", "drop last", "replicated", "reader process"],
)
@pytest.mark.ci_sample(3)
def test_concatenated_batches_of_ranks_equal_those_of_one_worker(size, options):
    options = options | {"batch_size": 10}
    expected, _, drawn_after = read_noisy_epochs(Mesh.solo(), 22, options)
    for result, _, draw_numbers in on_mesh(size, read_noisy_epochs, 22, options):
        assert result == expected
        assert draw_numbers == drawn_after


def test_the_order_on_a_mesh_equals_a_data_loaders():
    dataset = TensorDataset(torch.arange(23))
    plain = DataLoader(dataset, 7, shuffle=True, generator=torch.Generator().manual_seed(9))
    expected = [[to_lists(batch) for batch in plain] for _ in range(2)]
    assert on_mesh(3, read_tensor_epochs) == [expected] * 3


def read_tensor_epochs(mesh: Mesh) -> Any:
    dataset = TensorDataset(torch.arange(23))
    return read_epochs(loader_on(mesh, dataset, batch_size=7, shuffle=True, seed=9))


def test_each_rank_reads_its_own_rows_once():
    reads = [read for _, read, _ in on_mesh(3, read_noisy_epochs, 10, {"batch_size": 10})]
    compared = [0, 0]  # after its first batch, each rank reads a sample that all compare
    assert reads == [[*own, *compared, *own] for own in ([0, 1, 2, 3], [4, 5, 6], [7, 8, 9])]


def test_a_last_batch_smaller_than_the_mesh_is_plain_on_every_rank():
    found = on_mesh(3, describe_first_leaves, 9, {"batch_size": 7})
    assert [rank[0] for rank in found] == [
        ("LogicalTensor", (7,), [0, 1, 2]),
        ("LogicalTensor", (7,), [3, 4]),
        ("LogicalTensor", (7,), [5, 6]),
    ]
    assert [rank[1] for rank in found] == [("Tensor", (2,), [7, 8])] * 3


def read_named(mesh: Mesh, reading: str) -> list[Any]:
    return [batch["name"] for batch in loader_on(mesh, Named(4), batch_size=4, reading=reading)]


@pytest.mark.parametrize("reading", ["split", "replicated", "first"])
def test_every_rank_has_all_texts(reading):
    assert on_mesh(2, read_named, reading) == [[[f"sample {index}" for index in range(4)]]] * 2


def transpose(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.stack([sample["pair"][0] for sample in samples], dim=1)


def pad(samples: list[dict[str, Any]]) -> torch.Tensor:
    longest = max(sample["index"] for sample in samples)
    return torch.zeros(len(samples), longest)


def mask(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.rand(len(samples))


def collate_with(mesh: Mesh, collate_name: str, options: dict[str, Any]) -> list[Any]:
    torch.manual_seed(4)
    loader = loader_on(mesh, Noisy(8), batch_size=8, collate_fn=globals()[collate_name], **options)
    return [to_lists(batch) for batch in loader]


@pytest.mark.parametrize(
    ("collate_name", "message"),
    [
        ("transpose", r"batch: shape \[2, 4\]"),
        ("pad", r"rank 1 has \[\('batch', 'torch.float32 \[7\]'\)\]"),
        ("mask", "collate_fn that draws random numbers"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_fn_whose_rows_are_not_the_samples_raises(collate_name, message, num_workers):
    with pytest.raises(DataError, match=message):
        on_mesh(2, collate_with, collate_name, {"num_workers": num_workers, "reading": "split"})


@pytest.mark.exhaustive
@pytest.mark.parametrize("collate_name", ["transpose", "pad", "mask"])
def test_replicated_reading_collates_as_one_worker(collate_name):
    expected = collate_with(Mesh.solo(), collate_name, {"reading": "replicated"})
    assert on_mesh(2, collate_with, collate_name, {"reading": "replicated"}) == [expected] * 2


def shuffle_by_rank(mesh: Mesh) -> None:
    torch.manual_seed(mesh.rank)
    list(loader_on(mesh, Noisy(8), batch_size=8, shuffle=True))


def sample_by_rank(mesh: Mesh) -> None:
    order = [0, 1, 2, 3] if mesh.rank == 0 else [0, 1, 3, 2]
    list(loader_on(mesh, Noisy(4), batch_size=2, sampler=order))


@pytest.mark.parametrize("function", [shuffle_by_rank, sample_by_rank])
def test_ranks_that_would_read_different_batches_raise(function):
    with pytest.raises(DataError, match="rank 1 has other samples, or another seed, than rank 0"):
        on_mesh(2, function)


def read_broken(mesh: Mesh) -> int:
    return len(list(loader_on(mesh, BrokenOnOneRank(8), batch_size=8)))


def test_an_unreadable_sample_raises_on_every_rank_and_names_its_reader():
    with pytest.raises(DataError, match=r"rank 1 failed: OSError: disk gone \(index 5\)") as raised:
        on_mesh(2, read_broken)
    assert "on rank 0 of 2" in raised.value.__notes__[0]
