"""On one worker a loader equals a `DataLoader`: the same batches in the same order and the same draws."""

import random
from collections.abc import Iterable
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from rankless.context.world import World
from rankless.data.loader import Loader, LoaderOptions
from rankless.errors import DataError
from rankless.parallel.mesh import Mesh
from rankless.user_code import display_name


def loader_of(dataset: Any, **options: Any) -> Loader:
    world = World(mesh=Mesh.solo(), notify=print, send_record=print)
    return Loader(dataset, options=LoaderOptions(**options), world=lambda: world)


def numbers(rows: int) -> TensorDataset:
    return TensorDataset(torch.arange(rows * 3, dtype=torch.float64).reshape(rows, 3), torch.arange(rows))


class Samples(Dataset[Any]):
    """Dicts of tensors, NumPy arrays, numbers, text and nested tuples."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "tensor": torch.full((2,), index),
            "array": numpy.full((2, 2), index, dtype=numpy.float32),
            "number": index / 2,
            "pair": (index, [index, float(index)]),
            "text": f"sample {index}",
        }


class Noisy(Dataset[Any]):
    """Each sample draws from all three generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return index, torch.rand(2), numpy.random.rand(), random.random()


def to_texts(batches: Iterable[Any]) -> list[Any]:
    return [repr(batch) for batch in batches]


def draw_from_all_generators() -> tuple[Any, ...]:
    return torch.rand(1).item(), numpy.random.rand(), random.random()


def seed_all_generators() -> None:
    torch.manual_seed(5)
    numpy.random.seed(5)
    random.seed(5)


@pytest.mark.parametrize("rows", [1, 9, 10, 11])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_three_epochs_equal_a_data_loaders_and_leave_equal_generators(rows, drop_last, seed, shuffle):
    torch.manual_seed(1)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    plain = DataLoader(numbers(rows), 5, shuffle=shuffle, drop_last=drop_last, generator=generator)
    expected = [(to_texts(plain), torch.rand(1).item()) for _ in range(3)]
    torch.manual_seed(1)
    ours = loader_of(numbers(rows), batch_size=5, shuffle=shuffle, drop_last=drop_last, seed=seed)
    assert [(to_texts(ours), torch.rand(1).item()) for _ in range(3)] == expected
    assert len(ours) == len(plain)
    assert ours.epoch == 3


def test_shuffled_epochs_differ():
    ours = loader_of(numbers(50), batch_size=50, shuffle=True, seed=0)
    assert to_texts(ours) != to_texts(ours)


def test_two_zipped_loaders_draw_as_two_zipped_data_loaders():
    torch.manual_seed(1)
    expected = to_texts(zip(*(DataLoader(numbers(9), 2, shuffle=True) for _ in range(2)), strict=True))
    torch.manual_seed(1)
    ours = (loader_of(numbers(9), batch_size=2, shuffle=True) for _ in range(2))
    assert to_texts(zip(*ours, strict=True)) == expected


@pytest.mark.parametrize("collate_fn", [None, lambda samples: [sample["tensor"].sum() for sample in samples]])
def test_batches_are_collated_as_by_a_data_loader(collate_fn):
    expected = to_texts(DataLoader(Samples(), 4, collate_fn=collate_fn))
    assert to_texts(loader_of(Samples(), batch_size=4, collate_fn=collate_fn)) == expected


@pytest.mark.parametrize("tensor", [torch.rand(3, 8).T, torch.rand(8, 2, 4, 4).to(memory_format=torch.channels_last)])
def test_a_tensor_dataset_of_any_layout_keeps_values_and_strides(tensor):
    (expected,), (ours,) = (
        DataLoader(TensorDataset(tensor), 8),
        loader_of(TensorDataset(tensor), batch_size=8),
    )
    assert torch.equal(ours[0], expected[0])
    assert ours[0].stride() == expected[0].stride()


def test_a_custom_sampler_draws_as_under_a_data_loader():
    def sampler() -> WeightedRandomSampler:
        return WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 9)

    torch.manual_seed(1)
    plain = DataLoader(numbers(4), 2, sampler=sampler())
    expected = [to_texts(plain) for _ in range(2)]
    torch.manual_seed(1)
    ours = loader_of(numbers(4), batch_size=2, sampler=sampler())
    assert [to_texts(ours) for _ in range(2)] == expected


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)], ids=["in-process", "two readers"])
def test_replicated_reading_draws_as_a_data_loader(num_workers):
    seed_all_generators()
    expected = to_texts(DataLoader(Noisy(), 4, shuffle=True, num_workers=num_workers)), draw_from_all_generators()
    seed_all_generators()
    ours = loader_of(Noisy(), batch_size=4, shuffle=True, num_workers=num_workers, reading="replicated")
    assert (to_texts(ours), draw_from_all_generators()) == expected


def by_index(batches: Iterable[Any]) -> dict[int, tuple[Any, ...]]:
    return {
        int(index): (draw.tolist(), float(one), float(two))
        for indices, draws, ones, twos in batches
        for index, draw, one, two in zip(indices, draws, ones, twos, strict=True)
    }


@pytest.mark.slow
def test_split_reading_draws_depend_on_seed_epoch_and_index_only():
    ours = loader_of(Noisy(), batch_size=4, shuffle=True, seed=7)
    first, second = by_index(ours), by_index(ours)
    other = loader_of(Noisy(), batch_size=3, seed=7, num_workers=2)
    assert by_index(other) == first
    assert by_index(other) == second
    assert first != second
    assert by_index(loader_of(Noisy(), batch_size=4, seed=8)) != first
    assert len({repr(draws) for draws in first.values()}) == 10


def test_split_reading_restores_the_generators_of_the_script():
    seed_all_generators()
    expected = draw_from_all_generators()
    seed_all_generators()
    list(loader_of(Noisy(), batch_size=4, seed=7))
    assert draw_from_all_generators() == expected


def test_without_a_seed_a_new_loader_draws_new_numbers():
    torch.manual_seed(1)
    first, second = (by_index(loader_of(Noisy(), batch_size=4)) for _ in range(2))
    torch.manual_seed(1)
    again = by_index(loader_of(Noisy(), batch_size=4))
    assert first == again
    assert first != second


class Broken(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 6:
            raise KeyError("no such file")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)], ids=["in-process", "two readers"])
def test_an_error_of_the_data_set_names_its_index_and_line(num_workers):
    with pytest.raises(DataError, match="KeyError: 'no such file' \\(index 6\\)") as raised:
        list(loader_of(Broken(), batch_size=4, num_workers=num_workers))
    assert raised.value.where.startswith(display_name(__file__))


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(3))


class Unmeasured:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (numbers(4), {"batch_size": 0}, "batch_size of at least 1"),
        (numbers(4), {"batch_size": None, "drop_last": True}, "a batch_size with drop_last"),
        (numbers(4), {"batch_size": 2, "batch_sampler": [[0, 1]]}, "found:    both: batch_size=2"),
        (numbers(4), {"batch_sampler": [[0, 1]], "drop_last": True}, "batch_sampler or drop_last"),
        (numbers(4), {"seed": 1, "generator": torch.Generator()}, "seed or generator"),
        (numbers(4), {"persistent_workers": True, "prefetch_factor": 2}, "prefetch_factor and persistent_workers"),
        (numbers(4), {"timeout": -1}, "a timeout of at least 0"),
        (numbers(4), {"batch_size": True}, "found:    True"),
        (numbers(4), {"batch_size": 2, "num_workers": -1}, "num_workers of at least 0"),
        (numbers(4), {"batch_size": 2, "seed": 0.5}, "a seed that is an integer"),
        (numbers(4), {"batch_size": 2, "sampler": [1, 2], "shuffle": True}, "found:    both"),
        (numbers(4), {"batch_size": 2, "reading": "whole"}, "split, replicated, first"),
        (numbers(0), {"batch_size": 2, "shuffle": True}, "at least one sample"),
        (Stream(), {"batch_size": 2, "shuffle": True}, "Stream with shuffle"),
        (Unmeasured(), {"batch_size": 2}, "Unmeasured without __len__"),
        ({1, 2}, {"batch_size": 2}, "set without __getitem__"),
        (DataLoader(numbers(4)), {"batch_size": 2}, "found:    a DataLoader\n.*pass its data set"),
    ],
)
def test_unsupported_options_raise_at_once(dataset, options, message):
    with pytest.raises(DataError, match=message):
        loader_of(dataset, **options)


def test_a_data_set_without_a_length_is_read_in_sampler_order():
    assert [batch.tolist() for batch in loader_of(Unmeasured(), batch_size=2, sampler=[3, 1, 2])] == [
        [3, 1],
        [2],
    ]
