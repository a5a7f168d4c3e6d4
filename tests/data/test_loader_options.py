"""Our loader takes `DataLoader`'s options: the same batches in the same order, and the same draws afterwards."""

import inspect

import pytest
import torch
from data.loader_cases import (
    CASES,
    READER_CASES,
    Items,
    Noisy,
    loader_on,
    read_our_passes,
    read_passes,
    read_plain_passes,
    seed_all_generators,
)
from support.processes import on_mesh

import rankless
from rankless.errors import DataError
from rankless.parallel.mesh import Mesh

READINGS = ["auto", "split", "replicated", "first"]


@pytest.mark.parametrize("case", CASES)
def test_on_one_worker_three_passes_equal_a_data_loaders(case):
    expected = read_plain_passes(case)
    for reading in READINGS:
        assert read_our_passes(Mesh.solo(), case, reading) == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", READER_CASES)
@pytest.mark.ci_sample(1)
def test_passes_with_reader_processes_equal_a_data_loaders(case):
    assert read_our_passes(Mesh.solo(), case, "split", 2) == read_plain_passes(case, 2)


def read_all_passes(mesh: Mesh, cases: list[str], reading: str, count: int) -> list[object]:
    return [read_our_passes(mesh, case, reading, count) for case in cases]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("reading", READINGS)
def test_on_a_mesh_concatenated_batches_equal_a_data_loaders(size, reading):
    expected = [read_plain_passes(case, 2) for case in CASES]
    for found in on_mesh(size, read_all_passes, list(CASES), reading, 2):
        for case, passes, plain in zip(CASES, found, expected, strict=True):
            assert passes == plain, case


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_on_a_mesh_each_rank_may_use_reader_processes(size):
    expected = [read_plain_passes(case, 2) for case in READER_CASES]
    assert on_mesh(size, read_all_passes, list(READER_CASES), "split", 2) == [expected] * size


def read_noisy_passes(mesh: Mesh, reading: str) -> list[object]:
    seed_all_generators()
    return read_passes(loader_on(mesh, Noisy(), batch_size=4, shuffle=True, reading=reading))


@pytest.mark.slow
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.ci_sample(2)
def test_random_numbers_of_samples_do_not_depend_on_the_number_of_ranks(reading):
    expected = read_noisy_passes(Mesh.solo(), reading)
    assert len({repr(batch) for batches, _ in expected for batch, _ in batches}) == 9
    for size in (2, 3):
        assert on_mesh(size, read_noisy_passes, reading) == [expected] * size


@pytest.mark.slow
def test_read_by_rank_0_samples_draw_as_under_a_data_loader():
    seed_all_generators()
    expected = read_passes(torch.utils.data.DataLoader(Noisy(), 4, shuffle=True))
    seed_all_generators()
    solo = read_passes(loader_on(Mesh.solo(), Noisy(), batch_size=4, shuffle=True, reading="first"))
    assert solo == expected


def sort_by_length(samples):
    samples = sorted(samples, key=lambda sample: -sample["pair"].number)
    return torch.stack([sample["x"] for sample in samples])


def subtract_mean(samples):
    rows = torch.stack([sample["x"] for sample in samples])
    return rows - rows.mean(dim=0)


def add_constant_list(samples):
    return {"x": torch.stack([sample["x"] for sample in samples]), "classes": ["cat", "dog", "cow"]}


def add_count(samples):
    return torch.stack([sample["x"] for sample in samples]), len(samples)


def collate_with(mesh: Mesh, name: str) -> list[object]:
    return list(loader_on(mesh, Items(6), batch_size=6, collate_fn=globals()[name], reading="split"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sort_by_length", "whose batch depends on the whole batch"),
        ("subtract_mean", "whose batch depends on the whole batch"),
        ("add_constant_list", r"whose batch\['classes'\] depends on the whole batch"),
        ("add_count", r"batch\[1\]: int 3"),
    ],
)
def test_split_reading_refuses_a_collate_fn_that_mixes_rows(name, message):
    with pytest.raises(DataError, match=message) as raised:
        on_mesh(2, collate_with, name)
    assert 'reading="replicated"' in raised.value.fix


def leave_early(mesh: Mesh) -> list[object]:
    """Loop as users do: left early, nested, zipped, started twice, used after an exception."""
    torch.manual_seed(1)
    inner, outer = (loader_on(mesh, Items(9), batch_size=3, shuffle=True) for _ in range(2))
    found: list[object] = []
    for number, batch in enumerate(outer):
        found.append(batch["x"].sum().item())
        found += [other["x"].mean().item() for other in inner]
        if number == 1:
            break
    found += [(one["x"].sum().item(), other["x"].sum().item()) for one, other in zip(inner, outer, strict=True)]
    twice = iter(inner), iter(inner)
    found += [next(one)["x"].sum().item() for one in twice + twice]
    try:
        for batch in outer:
            raise ValueError(batch["x"].shape)
    except ValueError:
        found += [batch["x"].sum().item() for batch in outer]
    return [*found, torch.rand(1).item(), outer.epoch]


@pytest.mark.slow
def test_broken_nested_and_zipped_loops_are_equal_on_any_number_of_ranks():
    expected = leave_early(Mesh.solo())
    assert expected[-1] == 4
    for size in (2, 3):
        assert on_mesh(size, leave_early) == [expected] * size


def test_the_positional_parameters_are_a_data_loaders():
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ours, theirs = (
        [item.name for item in inspect.signature(called).parameters.values() if item.kind in kinds]
        for called in (rankless.loader, torch.utils.data.DataLoader.__init__)
    )
    assert ["self", *ours] == theirs


def test_arguments_by_position_give_a_data_loaders_batches():
    rows = torch.arange(250.0)
    for arguments in ((101,), (101, None), (101, False, range(0, 250, 2)), (1, None, None, [[0, 5], [3]])):
        found = list(rankless.loader(rows, *arguments))
        expected = list(torch.utils.data.DataLoader(rows, *arguments))
        assert [batch.tolist() for batch in found] == [batch.tolist() for batch in expected]


def test_a_wrong_argument_by_position_is_refused_like_one_by_name():
    with pytest.raises(DataError, match="a batch_size of at least 1"):
        rankless.loader([1, 2], 0)
    with pytest.raises(DataError, match="sampler or shuffle"):
        rankless.loader([1, 2], 1, True, [0])
    with pytest.raises(TypeError, match="13 positional"):
        rankless.loader([1, 2], 1, False, None, None, 0, None, False, False, 0, None, None, None, 2)
