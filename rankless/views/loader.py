"""The loader: a one-process DataLoader's batches, in its order, of which each rank reads its own rows only.

Note [the same draws]: PyTorch's own DataLoader, RandomSampler and BatchSampler make the order here, so every
random number is drawn from the same generator at the same moment as in the plain script: the base seed when
an iteration begins, the sampler's seed and permutation when the first batch is asked for.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, get_args

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from rankless.collectives.mesh import Mesh
from rankless.errors import DataError
from rankless.program.placement import split_lengths
from rankless.views.batches import make_logical, require_agreement
from rankless.views.logical import GatherNotice
from rankless.views.reading import (
    BatchRead,
    BatchRequest,
    Collation,
    ReadingFailure,
    SampleReader,
    epoch_seed,
    has_plain_columns,
    sample_seed,
)
from rankless.views.world import World, WorldSource

Reading = Literal["split", "replicated"]


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How to batch; the names and meanings are PyTorch's DataLoader's.

    `batch_size` is the whole batch's, of all ranks. `seed` is that of the generator which a plain script
    would pass to DataLoader; without one, PyTorch's default generator is drawn from, as there. `reading` is
    "split" (each rank reads its own samples, each from its own seed) or "replicated" (each rank reads and
    collates all, with the random numbers of a plain DataLoader, and keeps its rows).
    """

    batch_size: int
    shuffle: bool = False
    seed: int | None = None
    drop_last: bool = False
    sampler: Iterable[Any] | None = None
    num_workers: int = 0
    collate_fn: Callable[[Any], Any] | None = None
    reading: Reading = "split"


class Loader:
    """An iterable of whole batches, over and over: one pass is one epoch, and `len()` is its number of
    batches.

    On one worker it yields what DataLoader yields. On more, tensors are logical, unless a batch has fewer
    rows than there are workers: then every rank reads it whole. Raises DataError for options and data that
    cannot be.
    """

    def __init__(self, dataset: Any, *, options: LoaderOptions, world: WorldSource) -> None:
        _check(dataset, options)
        self.dataset = dataset
        self.options = options
        self.epoch = 0
        """Passes begun so far."""
        self._world = world
        self._generator = None if options.seed is None else torch.Generator().manual_seed(options.seed)
        sampler = options.sampler
        if sampler is None and options.shuffle:
            sampler = RandomSampler(dataset, generator=self._generator)
        elif sampler is None:
            sampler = SequentialSampler(dataset)
        self._batches = BatchSampler(sampler, options.batch_size, options.drop_last)
        self._notice: GatherNotice | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        world = self._world()
        if self._notice is None:
            self._notice = GatherNotice(world.say)
        columns = has_plain_columns(self.dataset)
        as_columns = columns and self.options.collate_fn is None and self.options.sampler is None
        seeded = self.options.reading == "split" and not columns
        seed = self._epoch_seed() if seeded else None
        self.epoch += 1
        whole = world.mesh.size == 1 or self.options.reading == "replicated"
        loader: DataLoader[Any] = DataLoader(
            SampleReader(self.dataset, as_columns=as_columns),
            batch_sampler=RankBatches(self._batches, mesh=world.mesh, divided=not whole, seed_of_epoch=seed),
            num_workers=self.options.num_workers,
            collate_fn=Collation(self.options.collate_fn),  # type: ignore[arg-type]  # takes what our reader gives
            generator=self._generator,
        )
        # Not inside the generator below: DataLoader draws its base seed when iteration begins.
        return self._hand_out(iter(loader), world)

    def _hand_out(self, batches: Iterator[Any], world: World) -> Iterator[Any]:
        meter, turn = world.meter, world.passes.begin(batches=self._length())
        epoch = meter.begin_epoch(steps=self._length()) if meter is not None else None
        # A permutation that begins alike goes on alike; a user's sampler or collation may part any time.
        always = self.options.sampler is not None or self.options.collate_fn is not None
        for step, read in enumerate(batches):
            if isinstance(read, ReadingFailure):
                raise read.as_error()
            assert isinstance(read, BatchRead)
            if always or step == 0:
                require_agreement(read, mesh=world.mesh)
            assert self._notice is not None
            batch = make_logical(read, mesh=world.mesh, notice=self._notice)
            if meter is not None and epoch is not None:
                meter.batch(epoch, rows=read.request.rows)
            world.passes.hand_out(turn)
            yield batch
        world.passes.end(turn)
        if meter is not None and epoch is not None:
            meter.end_epoch(epoch)

    def _epoch_seed(self) -> int:
        """The seed of the coming epoch; without a seed of its own, from what DataLoader is about to draw."""
        if self.options.seed is not None:
            return epoch_seed(self.options.seed, self.epoch)
        twin = torch.Generator()
        twin.set_state(torch.default_generator.get_state())
        return epoch_seed(int(torch.empty((), dtype=torch.int64).random_(generator=twin).item()), self.epoch)

    def _length(self) -> int | None:
        try:
            return len(self)
        except TypeError:
            return None


class RankBatches(Sampler[Any]):
    """A request for each batch of one epoch: its indices, or this rank's part of them."""

    def __init__(self, batches: Iterable[list[Any]], *, mesh: Mesh, divided: bool, seed_of_epoch: int | None) -> None:
        self._batches = batches
        self._mesh = mesh
        self._divided = divided
        self._seed_of_epoch = seed_of_epoch

    def __iter__(self) -> Iterator[BatchRequest]:
        for indices in self._batches:
            yield self._request(indices)

    def _request(self, indices: list[Any]) -> BatchRequest:
        rows = len(indices)
        mesh, seed = self._mesh, self._seed_of_epoch
        digest = blake2b(repr((indices, seed)).encode(), digest_size=16).digest() if mesh.size > 1 else b""
        divided = self._divided and rows >= mesh.size
        if divided:
            lengths = split_lengths(rows, mesh.size)
            start = sum(lengths[: mesh.rank])
            indices = indices[start : start + lengths[mesh.rank]]
        seeds = None if seed is None else [sample_seed(seed, index) for index in indices]
        return BatchRequest(indices=indices, rows=rows, divided=divided, digest=digest, sample_seeds=seeds)


def _check(dataset: Any, options: LoaderOptions) -> None:
    """Raise DataError for what no loader can do."""
    if isinstance(dataset, IterableDataset):
        raise DataError(
            expected="a data set with __getitem__ and __len__",
            found=f"{type(dataset).__name__}, an IterableDataset",
            fix="give it __getitem__ and __len__ (a map-style Dataset); streams are not supported yet",
        )
    needed = ["__getitem__"] if options.sampler is not None else ["__getitem__", "__len__"]
    missing = [name for name in needed if not hasattr(dataset, name)]
    if missing:
        raise DataError(
            expected="a data set with __getitem__ and __len__",
            found=f"{type(dataset).__name__} without {' and '.join(missing)}",
            fix=f"define {' and '.join(missing)} on it",
        )
    _check_numbers(options)
    if options.sampler is not None and options.shuffle:
        raise DataError(
            expected="a sampler or shuffle=True",
            found="both",
            fix="leave out shuffle: the sampler makes the order",
        )
    if options.shuffle and len(dataset) == 0:
        raise DataError(expected="at least one sample to shuffle", found="0", fix="check how the data set is made")
    if options.reading not in get_args(Reading):
        raise DataError(
            expected=f"reading as one of {', '.join(get_args(Reading))}",
            found=repr(options.reading),
            fix='pass reading="split", or leave it out',
        )


def _check_numbers(options: LoaderOptions) -> None:
    size, readers = options.batch_size, options.num_workers
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise DataError(
            expected="a batch_size of at least 1: the rows of the whole batch",
            found=repr(size),
            fix="pass the batch size of the one-device script",
        )
    if not isinstance(readers, int) or isinstance(readers, bool) or readers < 0:
        raise DataError(
            expected="a num_workers of at least 0",
            found=repr(readers),
            fix="pass the number of reader processes per rank, or leave it out",
        )
    if options.seed is not None and not isinstance(options.seed, int):
        raise DataError(
            expected="a seed that is an integer, or None",
            found=repr(options.seed),
            fix="pass the seed of the generator that the one-device script gives its DataLoader",
        )
