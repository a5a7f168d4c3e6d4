"""What a DataLoader takes our loader takes: the same batches in the same order, and the same numbers drawn after."""

import pytest
import torch
from data.loader_cases import (
    CASES,
    READER_CASES,
    Items,
    Noisy,
    loader_on,
    our_passes,
    passes_over,
    plain_passes,
    start_generators,
)
from support.processes import on_mesh

from rankless.errors import DataError
from rankless.parallel.mesh import Mesh

READINGS = ["split", "replicated", "first"]


@pytest.mark.parametrize("case", CASES)
def test_on_one_worker_three_passes_equal_a_data_loaders(case):
    expected = plain_passes(case)
    for reading in READINGS:
        assert our_passes(Mesh.solo(), case, reading) == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", READER_CASES)
def test_passes_with_reader_processes_equal_a_data_loaders(case):
    assert our_passes(Mesh.solo(), case, "split", 2) == plain_passes(case, 2)


def all_passes(mesh: Mesh, cases: list[str], reading: str, count: int) -> list[object]:
    return [our_passes(mesh, case, reading, count) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("reading", READINGS)
def test_on_a_mesh_concatenated_batches_equal_a_data_loaders(size, reading):
    expected = [plain_passes(case, 2) for case in CASES]
    for found in on_mesh(size, all_passes, list(CASES), reading, 2):
        for case, passes, plain in zip(CASES, found, expected, strict=True):
            assert passes == plain, case


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_on_a_mesh_each_rank_may_use_reader_processes(size):
    expected = [plain_passes(case, 2) for case in READER_CASES]
    assert on_mesh(size, all_passes, list(READER_CASES), "split", 2) == [expected] * size


def noisy_passes(mesh: Mesh, reading: str) -> list[object]:
    start_generators()
    return passes_over(loader_on(mesh, Noisy(), batch_size=4, shuffle=True, reading=reading))


@pytest.mark.slow
@pytest.mark.parametrize("reading", READINGS)
def test_random_numbers_of_samples_do_not_depend_on_the_number_of_ranks(reading):
    expected = noisy_passes(Mesh.solo(), reading)
    assert len({repr(batch) for batches, _ in expected for batch, _ in batches}) == 9
    for size in (2, 3):
        assert on_mesh(size, noisy_passes, reading) == [expected] * size


@pytest.mark.slow
def test_read_by_rank_0_samples_draw_as_under_a_data_loader():
    start_generators()
    expected = passes_over(torch.utils.data.DataLoader(Noisy(), 4, shuffle=True))
    start_generators()
    solo = passes_over(loader_on(Mesh.solo(), Noisy(), batch_size=4, shuffle=True, reading="first"))
    assert solo == expected


def sorted_by_length(samples):
    samples = sorted(samples, key=lambda sample: -sample["pair"].number)
    return torch.stack([sample["x"] for sample in samples])


def less_their_mean(samples):
    rows = torch.stack([sample["x"] for sample in samples])
    return rows - rows.mean(dim=0)


def with_a_constant_list(samples):
    return {"x": torch.stack([sample["x"] for sample in samples]), "classes": ["cat", "dog", "cow"]}


def counted(samples):
    return torch.stack([sample["x"] for sample in samples]), len(samples)


def collate_with(mesh: Mesh, name: str) -> list[object]:
    return list(loader_on(mesh, Items(6), batch_size=6, collate_fn=globals()[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sorted_by_length", "whose batch depends on the whole batch"),
        ("less_their_mean", "whose batch depends on the whole batch"),
        ("with_a_constant_list", r"whose batch\['classes'\] depends on the whole batch"),
        ("counted", r"batch\[1\]: int 3"),
    ],
)
def test_split_reading_refuses_a_collate_fn_that_mixes_rows(name, message):
    with pytest.raises(DataError, match=message) as raised:
        on_mesh(2, collate_with, name)
    assert 'reading="replicated"' in raised.value.fix


def leave_early(mesh: Mesh) -> list[object]:
    """Loops as people write them: left early, nested, in step, begun twice, used after an exception."""
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
