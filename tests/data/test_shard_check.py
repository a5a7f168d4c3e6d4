"""`check_shards` finds out whether ranks divide the data, and changes nothing that training draws later."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.processes import on_mesh
from support.warm_runs import run_script
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import DistributedSampler as TorchSampler

import rankless
from rankless.collectives import DistributedSampler
from rankless.context.world import World
from rankless.data.disjoint_shards_check import ShardCheckOptions, require_shards
from rankless.data.loader import Loader, LoaderOptions
from rankless.errors import RanklessError
from rankless.parallel.mesh import Mesh


def rows(count: int, start: int = 0) -> TensorDataset:
    numbers = torch.arange(start, start + count)
    return TensorDataset(numbers.double().unsqueeze(1) * torch.tensor([1.0, 0.5]), numbers)


class Stream(IterableDataset):
    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for number in self.numbers:
            yield {"x": torch.tensor([float(number), 1.0]), "name": f"sample {number}"}


class Augmented(Dataset):
    """A data set that draws random numbers; its order may differ between ranks."""

    def __init__(self, order: Any) -> None:
        self.order = list(order)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return torch.tensor([float(self.order[index]), 0.0]) + torch.rand(2) + random.random() + numpy.random.rand()


class OneTimeStream(IterableDataset):
    def __iter__(self) -> "OneTimeStream":
        return self

    def __next__(self) -> int:
        raise StopIteration


class RepeatableBatches:
    """Batches that can be iterated again and again."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def iterate_endlessly(mesh: Mesh, count: int) -> Iterator[int]:
    while True:
        yield from range(mesh.rank, count, mesh.size)


class Endless:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __iter__(self) -> Iterator[int]:
        return iterate_endlessly(self.mesh, 10)


def own_indices(mesh: Mesh, count: int) -> range:
    return range(mesh.rank, count, mesh.size)


def make_our_loader(mesh: Mesh, dataset: Any, **options: Any) -> Loader:
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    return Loader(dataset, options=LoaderOptions(**options), world=lambda: world)


Case = Callable[[Mesh], Any]

DIVIDED: dict[str, Case] = {
    "our sampler": lambda _: DataLoader(rows(24), 2, sampler=DistributedSampler(rows(24))),
    "our sampler, drop_last": lambda _: DataLoader(rows(25), 3, sampler=DistributedSampler(rows(25), drop_last=True)),
    "batches dropped too": lambda _: DataLoader(rows(30), 4, sampler=DistributedSampler(rows(30)), drop_last=True),
    "torch's sampler": lambda _: DataLoader(rows(24), 2, sampler=TorchSampler(rows(24))),
    "a sampler alone": lambda _: DistributedSampler(rows(25)),
    "a batch sampler alone": lambda _: BatchSampler(DistributedSampler(rows(24)), 5, False),
    "a Subset of its own": lambda mesh: DataLoader(Subset(rows(24), own_indices(mesh, 24)), 2, shuffle=True),
    "a part of a Subset": lambda _: DataLoader(
        (part := Subset(rows(40), range(5, 29))), 2, sampler=DistributedSampler(part)
    ),
    "without batches": lambda _: DataLoader(rows(24), batch_size=None, sampler=DistributedSampler(rows(24))),
    "data of its own": lambda mesh: DataLoader(rows(6, 100 * mesh.rank), 2, shuffle=True),
    "more data of its own": lambda mesh: DataLoader(rows(5 + mesh.rank, 100 * mesh.rank), 4, shuffle=True),
    "a stream": lambda mesh: DataLoader(Stream(own_indices(mesh, 24)), 2),
    "batches": lambda mesh: RepeatableBatches([torch.arange(4.0).view(2, 2) + 10 * mesh.rank]),
    "a stream, two readers": lambda mesh: DataLoader(Stream(range(mesh.rank, 99, mesh.size)), 4, num_workers=1),
    "draws with replacement": lambda mesh: DataLoader(
        rows(24), 2, sampler=WeightedRandomSampler([1.0] * 24, 12, generator=torch.Generator().manual_seed(mesh.rank))
    ),
    "a rankless.loader": lambda mesh: make_our_loader(mesh, rows(25), batch_size=4, shuffle=True, seed=3),
    "a rankless.loader of a stream": lambda mesh: make_our_loader(mesh, Stream(range(25)), batch_size=4),
}
UNDIVIDED: dict[str, tuple[Case, list[str]]] = {
    "no sampler": (
        lambda _: DataLoader(rows(24), 2, shuffle=True),
        ["24 of 24 come to several ranks: 0 (RANKS), 1 (RANKS)", "and 19 more", "RandomSampler()"],
    ),
    "in order": (lambda _: DataLoader(rows(24), 2), ["24 of 24", "SequentialSampler()"]),
    "a sampler made before joining": (
        lambda _: DataLoader(rows(9), 2, sampler=DistributedSampler(rows(9), 1, 0)),
        ["9 of 9 come to several ranks", "DistributedSampler(rank=0, num_replicas=1, seed=0, epoch=0)"],
    ),
    "other seeds": (
        lambda mesh: DataLoader(rows(60), 2, sampler=DistributedSampler(rows(60), seed=mesh.rank)),
        ["come to several ranks", "rank 1: DistributedSampler(rank=1, num_replicas=", "seed=1"],
    ),
    "one sample twice": (
        lambda mesh: DataLoader(
            rows(60), 2, sampler=[*own_indices(mesh, 60)][:20] if mesh.rank else [1, *own_indices(mesh, 60)][:20]
        ),
        ["1 of 60 come to several ranks: 1 (ranks 0, 1)"],
    ),
    "overlapping Subsets": (
        lambda mesh: DataLoader(Subset(rows(40), range(8 * mesh.rank, 8 * mesh.rank + 10)), 2),
        ["8 (ranks 0, 1)", "9 (ranks 0, 1)"],
    ),
    "some left out": (
        lambda mesh: DataLoader(rows(30), 2, sampler=[*own_indices(mesh, 30)][: 30 // mesh.size - 1]),
        ["of 30 come to no rank: ", "29"],
    ),
    "one batch more": (
        lambda mesh: DataLoader(rows(4 * mesh.size + 1), 4, sampler=DistributedSampler(rows(4 * mesh.size + 1))),
        ["rank 0: 2; rank 1: 1"],
    ),
    "the same draws with replacement": (
        lambda _: DataLoader(
            rows(24), 2, sampler=WeightedRandomSampler([1.0] * 24, 30, generator=torch.Generator().manual_seed(4))
        ),
        ["ranks 0 and 1 draw the same 30", "WeightedRandomSampler"],
    ),
    "the same stream": (
        lambda _: DataLoader(Stream(range(12)), 2),
        ["samples of one rank are also on another rank: 0 of rank 1 is 0 of rank 0", "(counted from 0 on each rank)"],
    ),
    "streams that overlap": (
        lambda mesh: DataLoader(Stream(range(8 * mesh.rank, 8 * mesh.rank + 10)), 2),
        ["0 of rank 1 is 8 of rank 0, 1 of rank 1 is 9 of rank 0"],
    ),
    "streams of other lengths": (
        lambda mesh: DataLoader(Stream(range(100 * mesh.rank, 102 * mesh.rank + 4)), 2),
        ["rank 0: 2; rank 1: 3"],
    ),
    "data of its own that is the same": (
        lambda mesh: DataLoader(rows(8 + mesh.rank), 8),
        ["also on another rank: 0 of rank 1 is 0 of rank 0"],
    ),
    "the same batches": (
        lambda _: RepeatableBatches([torch.ones(2, 2)] * 3),
        ["batches of one rank are also on another rank"],
    ),
    "a rankless.loader of a divided sampler": (
        lambda mesh: make_our_loader(mesh, rows(24), batch_size=4, sampler=DistributedSampler(rows(24))),
        ["already divides them: DistributedSampler for "],
    ),
    "rankless.loaders of other batches": (
        lambda mesh: make_our_loader(mesh, rows(24), batch_size=4 + mesh.rank),
        ["'batch_size': 4", "'batch_size': 5"],
    ),
    "a loader and a sampler": (
        lambda mesh: Stream(own_indices(mesh, 4)) if mesh.rank else DataLoader(rows(4)),
        ["rank 0: a sampler's; rank 1: batches"],
    ),
}


def run_check(mesh: Mesh, cases: str, name: str, **options: Any) -> tuple[str, list[str]]:
    """Return the error and the warnings of the check of a case."""
    case = {"divided": DIVIDED, "suspicious": {key: case for key, (case, _) in SUSPICIOUS.items()}}.get(cases)
    loader = (case[name] if case else UNDIVIDED[name][0])(mesh)
    warnings: list[str] = []
    try:
        require_shards(loader, ShardCheckOptions(**options), mesh=mesh, notify=warnings.append)
    except RanklessError as error:
        return f"{type(error).__name__} {error}", warnings
    return "", warnings


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.ci_sample(11)
def test_divided_data_passes_without_a_warning(name: str, size: int):
    assert on_mesh(size, run_check, "divided", name) == [("", [])] * size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", UNDIVIDED)
def test_undivided_data_raises_on_every_rank_with_ranks_and_samples(name: str, size: int):
    for text, warnings in on_mesh(size, run_check, "undivided", name):
        assert text.startswith("RanksDiverged")
        ranks = {2: "ranks 0, 1", 3: "ranks 0-2"}[size]
        assert all(words.replace("RANKS", ranks) in text for words in UNDIVIDED[name][1]), text
        assert warnings == []


SUSPICIOUS: dict[str, tuple[Case, str]] = {
    "padding": (
        lambda mesh: DataLoader(rows(12 * mesh.size - 1), 2, sampler=TorchSampler(rows(12 * mesh.size - 1))),
        "samples come twice because of padding: pass drop_last=True",
    ),
    "files in another order": (
        lambda mesh: DataLoader(
            data := Augmented(range(24) if mesh.rank == 0 else range(23, -1, -1)), 2, sampler=DistributedSampler(data)
        ),
        "index 0 of the data set holds another sample on rank 1 than on rank 0",
    ),
    "few equal rows": (
        lambda mesh: DataLoader(Stream([5000, *range(100 * mesh.rank, 100 * mesh.rank + 29)]), 2),
        "samples of one rank are also on another rank: 0 of rank 1 is 0 of rank 0",
    ),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SUSPICIOUS)
def test_suspicious_data_only_warns(name: str, size: int):
    for text, warnings in on_mesh(size, run_check, "suspicious", name):
        assert text == ""
        assert len(warnings) == 1
        assert SUSPICIOUS[name][1] in warnings[0]


def check_relaxed(mesh: Mesh) -> list[str]:
    most = DataLoader(rows(30), 2, sampler=[*own_indices(mesh, 30)][:10])
    uneven = DataLoader(rows(4 * mesh.size + 1), 4, sampler=DistributedSampler(rows(4 * mesh.size + 1)))
    endless = DataLoader(rows(10), 2, sampler=Endless(mesh))
    found = []
    for loader, options in [
        (most, {"all_samples": False}),
        (uneven, {"even": False}),
        (endless, {"batches": 2}),
        (uneven, {"batches": 1}),
    ]:
        for chosen in (options, {} if options != {"batches": 1} else {"batches": 0}):
            try:
                require_shards(loader, ShardCheckOptions(**chosen), mesh=mesh, notify=found.append)
                found.append("")
            except RanklessError as error:
                found.append(f"{type(error).__name__}{error}")
    return found


def test_options_allow_intended_differences():
    for missing, without, uneven, with_even, endless, whole, first, none in on_mesh(2, check_relaxed):
        assert (missing, uneven, endless, first) == ("", "", "", "")
        assert "batches=0" in none
        assert "10 of 30 come to no rank" in without
        assert "rank 0: 2; rank 1: 1" in with_even
        assert whole.startswith("ConfigError")
        assert "pass batches=" in whole


def get_all_states() -> list[bytes]:
    return [
        torch.get_rng_state().numpy().tobytes(),
        repr(numpy.random.get_state()).encode(),
        repr(random.getstate()).encode(),
    ]


def make_plain_loader(mesh: Mesh, kind: str, generator: torch.Generator) -> DataLoader:
    data = Augmented(range(mesh.rank, 24, mesh.size))
    if kind == "a stream":
        return DataLoader(Stream(own_indices(mesh, 10)), 2)
    if kind == "generators":
        return DataLoader(data, 2, sampler=RandomSampler(data, generator=generator), generator=generator)
    if kind == "a part":
        return DataLoader(data, 2, sampler=SubsetRandomSampler(range(4)))
    readers = {"num_workers": 1, "persistent_workers": True} if kind == "persistent readers" else {}
    return DataLoader(data, 2, shuffle=True, **readers)


def check_side_effects(mesh: Mesh, kind: str) -> list[bool]:
    """Return whether a check keeps all generators, and whether training then gets the same batches."""
    generator = torch.Generator()
    trained, unchanged = [], []
    for checked in (False, True):
        torch.manual_seed(7 + mesh.rank)
        random.seed(1)
        numpy.random.seed(1)
        generator.manual_seed(5)
        loader = make_plain_loader(mesh, kind, generator)
        if checked:
            before, state = get_all_states(), generator.get_state()
            require_shards(loader, ShardCheckOptions(all_samples=False), mesh=mesh, notify=lambda _: None)
            unchanged = [get_all_states() == before, torch.equal(state, generator.get_state())]
            unchanged.append(getattr(loader.dataset, "passes", 0) == 0)
        trained.append(torch.cat([batch["x"] if isinstance(batch, dict) else batch for batch in loader]))
    return [*unchanged, torch.equal(*trained)]


@pytest.mark.parametrize("kind", ["shuffled", "generators", "a part", "a stream", "persistent readers"])
def test_a_check_does_not_change_random_numbers_of_training(kind: str):
    assert on_mesh(2, check_side_effects, kind) == [[True] * 4] * 2


def check_after_pass(mesh: Mesh) -> list[Any]:
    """Check after a whole pass, twice: it must neither warn of a missing set_epoch nor count as a pass."""
    sampler = DistributedSampler(rows(8))
    loader = DataLoader(rows(8), 2, sampler=sampler)
    passed = [list(loader)]
    for _ in range(2):
        require_shards(loader, ShardCheckOptions(), mesh=mesh, notify=passed.append)
    found = sampler.warned_same_epoch
    passed.append(list(loader))
    return [len(passed), found, sampler.warned_same_epoch]


def test_a_check_does_not_count_as_a_pass_of_the_sampler():
    assert on_mesh(2, check_after_pass) == [[2, False, True]] * 2


def check_iterator(mesh: Mesh, once: str) -> str:
    passes = {
        "an iterator": iter([1]),
        "a stream that ends for good": DataLoader(OneTimeStream(), 2),
        "an iterator of indices": DataLoader(rows(4), sampler=iter([1])),
    }
    try:
        loader = passes[once] if mesh.rank else DataLoader(rows(4))
        require_shards(loader, ShardCheckOptions(), mesh=mesh, notify=lambda _: None)
    except RanklessError as error:
        return f"{type(error).__name__}{error}"
    return ""


@pytest.mark.parametrize("once", ["an iterator", "a stream that ends for good", "an iterator of indices"])
def test_an_iterator_raises_on_every_rank(once: str):
    first, second = on_mesh(2, check_iterator, once)
    assert first.startswith("CollectiveError")
    assert second.startswith("ConfigError")
    assert "which can be iterated once at most" in second


def test_one_rank_has_nothing_to_divide():
    assert rankless.check_shards(DataLoader(rows(4))) is None


SCRIPT = """
import torch, rankless
from rankless.collectives import DistributedSampler
from torch.utils.data import DataLoader, TensorDataset

rankless.init()
data = TensorDataset(torch.arange(12))
rankless.check_shards(DataLoader(data, batch_size=2, sampler=DistributedSampler(data)))
print("divided", flush=True)
try:
    rankless.once(lambda: rankless.check_shards(DataLoader(data)))
except rankless.RanklessError as error:
    print(error.found, flush=True)
rankless.check_shards(DataLoader(data, batch_size=2, shuffle=True))
"""


@pytest.mark.slow
def test_the_run_ends_with_the_error(tmp_path: Path):
    done = run_script(SCRIPT, "-n2", folder=tmp_path)
    assert done.returncode == 1
    assert "divided" in done.stdout
    assert "rankless.check_shards, in which all ranks must take part" in done.stdout
    assert "RanksDiverged" in done.stderr
    assert "12 of 12 come to several ranks: 0 (ranks 0, 1)" in done.stderr
