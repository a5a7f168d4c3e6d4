"""A stream's batches equal a `DataLoader`'s with every reading; a source that not all ranks can read raises."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from data.loader_cases import (
    STREAM_CASES,
    STREAM_READER_CASES,
    Stream,
    freeze,
    loader_on,
    read_our_passes,
    read_plain_passes,
)
from support.processes import on_mesh
from torch.utils.data import IterableDataset

from rankless.errors import DataError
from rankless.parallel.mesh import Mesh
from rankless.user_code import display_name

READINGS = ["auto", "split", "replicated", "first"]


@pytest.mark.parametrize("case", STREAM_CASES)
def test_on_one_worker_a_stream_is_read_as_by_a_data_loader(case):
    expected = read_plain_passes(case)
    for reading in READINGS:
        assert read_our_passes(Mesh.solo(), case, reading) == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", STREAM_READER_CASES)
def test_reader_processes_read_a_stream_as_a_data_loader_does(case):
    assert read_our_passes(Mesh.solo(), case, "split", 2) == read_plain_passes(case, 2)


def read_all_passes(mesh: Mesh, cases: list[str], reading: str) -> list[Any]:
    return [read_our_passes(mesh, case, reading, 2) for case in cases]


@pytest.mark.ci_sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("reading", READINGS)
def test_on_a_mesh_concatenated_stream_batches_equal_a_data_loaders(size, reading):
    expected = [read_plain_passes(case, 2) for case in STREAM_CASES]
    for found in on_mesh(size, read_all_passes, list(STREAM_CASES), reading):
        for case, passes, plain in zip(STREAM_CASES, found, expected, strict=True):
            assert passes == plain, case


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_on_a_mesh_reader_processes_divide_a_stream_as_in_a_data_loader(size):
    expected = [read_plain_passes(case, 2) for case in STREAM_READER_CASES]
    for reading in ("split", "first"):
        assert on_mesh(size, read_all_passes, list(STREAM_READER_CASES), reading) == [expected] * size


class Queue(IterableDataset[Any]):
    """A source of which each rank takes other samples."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        if self.rank == 0:
            yield from (torch.tensor([number, number]) for number in range(7))
        else:
            yield from (torch.tensor([number, -1]) for number in range(7))


def read_queue(mesh: Mesh, reading: str) -> list[Any]:
    return [freeze(batch) for batch in loader_on(mesh, Queue(mesh.rank), batch_size=4, reading=reading)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_source_that_differs_per_rank_raises_unless_rank_0_reads(size):
    for reading in ("split", "replicated"):
        with pytest.raises(DataError, match="rank 1 has other samples") as raised:
            on_mesh(size, read_queue, reading)
        assert 'reading="first"' in raised.value.fix
    found = on_mesh(size, read_queue, "first")
    assert found == [read_queue(Mesh.solo(), "split")] * size


class Shorter(Stream):
    def __iter__(self) -> Iterator[Any]:
        rows = 8 if torch.distributed.get_rank() == 0 else 4
        return (torch.tensor(number) for number in range(rows))


def read_shorter(mesh: Mesh) -> int:
    return len(list(loader_on(mesh, Shorter(), batch_size=4)))


@pytest.mark.slow
def test_a_stream_that_is_shorter_on_one_rank_raises_on_every_rank():
    with pytest.raises(DataError, match="rank 1 is at the end of its data, rank 0 has another batch"):
        on_mesh(2, read_shorter)


class Broken(IterableDataset[Any]):
    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        for number in range(20):
            if number == 9 and (self.rank is None or self.rank == torch.distributed.get_rank()):
                raise OSError("line cut off")
            yield torch.tensor(number)


def read_broken(mesh: Mesh, rank: int | None, options: dict[str, Any]) -> int:
    return len(list(loader_on(mesh, Broken(rank), batch_size=4, **options)))


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_of_a_stream_names_the_sample_and_the_line(num_workers):
    with pytest.raises(DataError, match=r"OSError: line cut off \(sample 9 of the stream, from 0") as raised:
        read_broken(Mesh.solo(), None, {"num_workers": num_workers})
    assert raised.value.where.startswith(display_name(__file__))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"rank 1 failed: OSError: line cut off \(sample 9"),
        ({"reading": "replicated", "num_workers": 1}, r"rank 1 failed: OSError: line cut off \(sample 9"),
    ],
)
def test_a_stream_error_on_one_rank_raises_on_every_rank(options, message):
    with pytest.raises(DataError, match=message):
        on_mesh(2, read_broken, 1, options)


@pytest.mark.slow
def test_a_stream_error_on_the_reading_rank_raises_on_every_rank():
    with pytest.raises(DataError, match="line cut off") as raised:
        on_mesh(3, read_broken, 0, {"reading": "first"})
    assert "sample 9 of the stream" in str(raised.value)


class Unsendable(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ({"x": torch.ones(1), "where": os.scandir("/")} for _ in range(4))


def read_unsendable(mesh: Mesh) -> int:
    return len(list(loader_on(mesh, Unsendable(), batch_size=4, collate_fn=list, reading="first")))


@pytest.mark.slow
def test_an_unserializable_batch_raises_on_every_rank_by_name():
    with pytest.raises(DataError, match=r"posix\.ScandirIterator|plain values, because rank 0 sends"):
        on_mesh(2, read_unsendable)


def test_a_stream_has_a_length_if_its_data_set_has_one():
    assert len(loader_on(Mesh.solo(), SizedShuffledStream(), batch_size=4)) == 6
    assert len(loader_on(Mesh.solo(), SizedShuffledStream(), batch_size=4, drop_last=True)) == 5
    with pytest.raises(TypeError):
        len(loader_on(Mesh.solo(), Stream(), batch_size=4))


class SizedShuffledStream(Stream):
    def __len__(self) -> int:
        return self.rows
