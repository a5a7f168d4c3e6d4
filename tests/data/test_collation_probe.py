"""With reading="auto" every collate_fn gives a plain DataLoader's batches, on any number of ranks."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from data import collate_cases
from data.collate_cases import (
    DRAWS,
    NEEDS_WHOLE,
    ROW_WISE,
    Augmented,
    Sequences,
    SomeMissing,
    drop_missing,
    pad_longest,
    stack_images,
)
from data.loader_cases import draw_numbers, freeze, seed_all_generators
from support.processes import on_mesh
from torch.utils.data import DataLoader, IterableDataset

from rankless.context.world import World
from rankless.data.loader import Loader, LoaderOptions
from rankless.data.probed_collation import SampleSizes
from rankless.errors import DataError
from rankless.parallel.mesh import Mesh

COMPARED = 2
"""How often each rank reads the first sample to compare it with the others'."""

pytestmark = pytest.mark.slow


def get_function(name: str) -> Any:
    return globals().get(name) or getattr(collate_cases, name)


def make_loader(mesh: Mesh, dataset: Any, **options: Any) -> tuple[Loader[Any], list[str]]:
    notices: list[str] = []
    world = World(mesh=mesh, notify=notices.append, send_record=print)
    return Loader(dataset, options=LoaderOptions(**options), world=lambda: world), notices


def freeze_all(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: freeze_all(part) for key, part in value.items()}
    return freeze(value.tolist() if hasattr(value, "tolist") and not isinstance(value, torch.Tensor) else value)


def read_twice(loader: Any) -> list[Any]:
    """Read two passes in a script that draws numbers at every batch, as dropout does."""
    passes = [[(freeze_all(batch), torch.rand(1).item()) for batch in loader] for _ in range(2)]
    return [*passes, draw_numbers()]


def read_plain(dataset: Any, **options: Any) -> list[Any]:
    seed_all_generators()
    return read_twice(DataLoader(dataset, **options))


def read_cases(mesh: Mesh, kind: str, names: list[str], options: dict[str, Any]) -> list[Any]:
    """Return for each case its passes, its notices, and how many samples this rank read."""
    found = []
    for name in names:
        seed_all_generators()
        dataset = Sequences()
        function = DRAWS[name]() if kind == "draws" else (ROW_WISE | NEEDS_WHOLE)[name]
        loader, notices = make_loader(mesh, dataset, collate_fn=function, **options)
        found.append((read_twice(loader), notices, len(dataset.read)))
    return found


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_row_wise_functions_are_collated_by_each_rank(size, num_workers):
    options = {"batch_size": 8, "shuffle": True, "num_workers": num_workers}
    ranks = on_mesh(size, read_cases, "row-wise", list(ROW_WISE), options)
    for number, name in enumerate(ROW_WISE):
        expected = read_plain(Sequences(), collate_fn=ROW_WISE[name], **options)
        for found, notices, read in (rank[number] for rank in ranks):
            assert found == expected, name
            assert not notices
            assert num_workers > 0 or read < 2 * 22 - 8, name  # after the first batch, own samples only


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_functions_that_need_the_whole_batch_get_it_with_one_notice(size, num_workers):
    options = {"batch_size": 8, "shuffle": True, "num_workers": num_workers}
    ranks = on_mesh(size, read_cases, "whole", list(NEEDS_WHOLE), options)
    for number, name in enumerate(NEEDS_WHOLE):
        expected = read_plain(Sequences(), collate_fn=NEEDS_WHOLE[name], **options)
        for found, notices, read in (rank[number] for rank in ranks):
            assert found == expected, name
            assert len(notices) == 1, name
            assert "collate_cases.py:" in notices[0]
            assert num_workers > 0 or read == 2 * 22 + COMPARED, name  # each sample of each pass once


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_functions_that_draw_random_numbers_draw_a_data_loaders(size, num_workers):
    options = {"batch_size": 8, "shuffle": True, "num_workers": num_workers}
    ranks = on_mesh(size, read_cases, "draws", list(DRAWS), options)
    for number, name in enumerate(DRAWS):
        expected = read_plain(Sequences(), collate_fn=DRAWS[name](), **options)
        for found, notices, _ in (rank[number] for rank in ranks):
            assert found == expected, name
            assert len(notices) == 1, name
            assert name == "counter" or "draws random numbers" in notices[0]


def explain_padding(mesh: Mesh) -> list[str]:
    loader, notices = make_loader(mesh, Sequences(), batch_size=6, collate_fn=pad_longest)
    list(loader)
    return notices


def test_the_notice_names_the_line_and_the_shapes():
    (notice,) = on_mesh(2, explain_padding)[0]
    assert "collate_fn pad_longest (" in notice
    assert "batch[0] has shape [6, 7] for the whole batch, [3, 5] for rank 0's part" in notice


def read_options(mesh: Mesh, name: str, kind: str, options: dict[str, Any]) -> list[Any]:
    seed_all_generators()
    dataset = {"augmented": Augmented, "missing": SomeMissing, "sequences": Sequences}[kind]()
    return read_twice(make_loader(mesh, dataset, collate_fn=get_function(name), **options)[0])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_a_function_drops_are_dropped_on_every_rank(num_workers):
    options = {"batch_size": 4, "num_workers": num_workers}
    expected = read_plain(SomeMissing(), collate_fn=drop_missing, **options)
    assert on_mesh(2, read_options, "drop_missing", "missing", options) == [expected] * 2


@pytest.mark.parametrize("name", ["stack_images", "pad_longest", "mix_up"])
def test_random_augmentation_is_equal_on_any_number_of_ranks(name):
    options = {"batch_size": 8, "shuffle": True}
    expected = read_options(Mesh.solo(), name, "augmented", options)
    for size in (2, 3):
        assert on_mesh(size, read_options, name, "augmented", options) == [expected] * size


@pytest.mark.ci_sample(4)
@pytest.mark.parametrize(
    "options",
    [
        {"batch_sampler": [[0, 1, 2, 3, 4], [5], [6, 7], [8, 9, 10, 11]]},
        {"batch_sampler": [[5], [0, 1, 2, 3, 4], [8, 9, 10, 11]]},
        {"batch_size": 5, "num_workers": 1, "persistent_workers": True, "prefetch_factor": 3},
        {"batch_size": 5, "drop_last": True, "sampler": list(range(21, 0, -2))},
    ],
    ids=["batch sampler", "first batch smaller than the mesh", "persistent workers", "sampler"],
)
@pytest.mark.parametrize("name", ["pad_longest", "stack_images", "mix_up"])
def test_samplers_and_persistent_workers_keep_a_data_loaders_batches(options, name):
    expected = read_plain(Sequences(), collate_fn=get_function(name), **options)
    assert on_mesh(2, read_options, name, "sequences", options) == [expected] * 2


LATE = {
    "ragged later": (4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 7, 2),
    "equal within each rank": (4, 4, 4, 4, 4, 4, 4, 4, 2, 2, 6, 6),
    "buckets": (4, 4, 4, 4, 2, 2, 2, 2, 6, 6, 6, 6),
    "last batch": (4,) * 20 + (4, 2),
}


def read_late(mesh: Mesh, name: str, lengths: str, options: dict[str, Any]) -> tuple[list[Any], list[str]]:
    seed_all_generators()
    loader, notices = make_loader(mesh, Sequences(lengths=LATE[lengths]), collate_fn=get_function(name), **options)
    return read_twice(loader), notices


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("name", ["pad_longest", "relative_lengths", "sort_by_length"])
@pytest.mark.parametrize("lengths", LATE)
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_what_only_a_later_batch_shows_is_read_again_as_whole(name, lengths, options):
    expected = read_plain(
        Sequences(lengths=LATE[lengths]), collate_fn=get_function(name), **({"batch_size": 4} | options)
    )
    for found, notices in on_mesh(2, read_late, name, lengths, {"batch_size": 4} | options):
        assert found == expected
        assert len(notices) == (0 if lengths == "buckets" else 1)


def draw_late(samples: list[Any]) -> Any:
    rows = stack_images(samples)["image"]
    return rows * torch.rand(1).item() if len({len(sample["x"]) for sample in samples}) > 1 else rows


def test_random_numbers_that_begin_later_are_a_data_loaders_or_refused():
    expected = read_plain(Sequences(lengths=LATE["ragged later"]), collate_fn=draw_late, batch_size=4)
    for found, notices in on_mesh(2, read_late, "draw_late", "ragged later", {"batch_size": 4}):
        assert found == expected
        assert len(notices) == 1
    with pytest.raises(DataError, match="changes after its first batch: it draws random numbers"):
        on_mesh(2, read_late, "draw_late", "ragged later", {"batch_size": 4, "num_workers": 1, "prefetch_factor": 1})


class SequenceStream(IterableDataset[Any]):
    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.sequences = Sequences(lengths=lengths)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.sequences[index] for index in range(first, len(self.sequences), step))


def read_stream(mesh: Mesh, name: str, lengths: tuple[int, ...], num_workers: int) -> tuple[list[Any], list[str]]:
    seed_all_generators()
    stream = SequenceStream(lengths)
    loader, notices = make_loader(mesh, stream, batch_size=5, collate_fn=get_function(name), num_workers=num_workers)
    return read_twice(loader), notices


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("name", ["pad_longest", "sort_by_length", "mix_up", "stack_images"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_decides_for_each_batch(name, num_workers):
    for lengths in ((3, 5, 2, 7, 4, 6, 1), (*([4] * 13), 2, 6)):
        expected = read_plain(
            SequenceStream(lengths), batch_size=5, collate_fn=get_function(name), num_workers=num_workers
        )
        for found, notices in on_mesh(2, read_stream, name, lengths, num_workers):
            assert found == expected
            assert len(notices) == (0 if name == "stack_images" else 1)


def resume_after(mesh: Mesh, name: str, batches: int) -> list[Any]:
    seed_all_generators()
    options = {"batch_size": 4, "shuffle": True, "collate_fn": get_function(name)}
    loader, _ = make_loader(mesh, Sequences(), **options)
    for number, _ in enumerate(loader, start=1):
        if number == batches:
            state = loader.state_dict()
            break
    resumed, _ = make_loader(mesh, Sequences(), **options)
    resumed.load_state_dict(state)
    return read_twice(resumed)


@pytest.mark.parametrize("name", ["pad_longest", "stack_images", "mix_up"])
def test_a_resumed_pass_is_probed_at_its_next_batch(name):
    expected = resume_after(Mesh.solo(), name, 2)
    assert on_mesh(2, resume_after, name, 2) == [expected] * 2


def test_buckets_of_one_length_never_verify_a_function():
    sizes = SampleSizes()
    reasons = []
    for length in (3, 4, 5) * 7:
        varying = sizes.note([torch.zeros(length)] * 3)
        reasons.append(sizes.verify(varying) if sizes.is_probe_due else "")
    assert reasons[0] == ""
    assert re.search(r"sample has one size in each of \d\d batches", reasons[-1])
    assert sizes.verify(sizes.note([torch.zeros(3), torch.zeros(4)])) == ""
    assert not sizes.is_probe_due


def test_two_sizes_verify_only_the_part_that_has_them():
    sizes = SampleSizes()
    first = [{"name": "ab", "x": torch.zeros(3)}, {"name": "abc", "x": torch.zeros(3)}]
    assert sizes.verify(sizes.note(first)) == ""
    sizes.note([{"name": "ab", "x": torch.zeros(3)}, {"name": "ab", "x": torch.zeros(5)}])
    assert sizes.is_probe_due
