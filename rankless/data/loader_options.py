"""The options of a loader, and the checks that run before it reads anything."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from rankless.errors import DataError

Reading = Literal["auto", "split", "replicated", "first"]


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options with the names and meanings of `torch.utils.data.DataLoader`.

    `batch_size` counts the rows of the whole batch, over all ranks. With None the data set returns whole batches.
    `seed` is the seed of the generator that a plain script would pass to `DataLoader`. Without `seed` and
    `generator`, PyTorch's default generator is used, as there. `device` is where batches are yielded; None leaves
    them where they were read.

    `reading` is one of:

    - "auto": as "split" if a probe of the `collate_fn` shows that rows do not depend on each other. Otherwise each
      rank reads and collates all samples, each with its own seed.
    - "split": each rank reads its own samples, each with its own seed. Of a stream, each rank collates its own samples.
    - "replicated": each rank reads and collates all samples, with a `DataLoader`'s random numbers, and keeps its rows.
    - "first": rank 0 reads as a `DataLoader` does, and sends each rank its rows.
    """

    batch_size: int | None = 1
    shuffle: bool = False
    seed: int | None = None
    generator: torch.Generator | None = None
    drop_last: bool = False
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    num_workers: int = 0
    collate_fn: Callable[[Any], Any] | None = None
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    timeout: float = 0
    device: str | torch.device | None = None
    reading: Reading = "auto"

    @property
    def has_custom_order(self) -> bool:
        """Whether user code decides which samples come. Ranks may then diverge at any batch."""
        return self.sampler is not None or self.batch_sampler is not None or self.collate_fn is not None

    @property
    def is_probed(self) -> bool:
        """Whether a probe of the `collate_fn` decides which samples a rank reads. PyTorch's own function needs none."""
        is_ours = self.collate_fn is None or self.collate_fn is default_collate
        return self.reading == "auto" and not is_ours

    @property
    def is_split(self) -> bool:
        """Whether each rank reads its own samples, unless a probe decides otherwise."""
        return self.reading in ("auto", "split")


def check_options(dataset: Any, options: LoaderOptions) -> None:
    """Raise `DataError` for options that no loader supports."""
    if isinstance(dataset, IterableDataset):
        _check_stream(dataset, options)
    else:
        _check_samples(dataset, options)
    _check_numbers(options)
    _check_readers(options)
    _check_order(options)
    if options.reading not in get_args(Reading):
        raise DataError(
            expected=f"reading as one of {', '.join(get_args(Reading))}",
            found=repr(options.reading),
            fix='leave it out: "auto" is right for every collate_fn',
        )


def _check_stream(dataset: Any, options: LoaderOptions) -> None:
    given = [name for name in ("shuffle", "sampler", "batch_sampler") if getattr(options, name)]
    if given:
        raise DataError(
            expected="an IterableDataset without a sampler: it decides its own order",
            found=f"{type(dataset).__name__} with {' and '.join(given)}",
            fix=f"leave out {' and '.join(given)}, and shuffle inside the data set's __iter__",
        )


def _check_samples(dataset: Any, options: LoaderOptions) -> None:
    ordered = options.sampler is not None or options.batch_sampler is not None
    needed = ["__getitem__"] if ordered else ["__getitem__", "__len__"]
    missing = [name for name in needed if not hasattr(dataset, name)]
    if isinstance(dataset, DataLoader):
        raise DataError(
            expected="a data set: this function makes the loader",
            found=f"a {type(dataset).__name__}",
            fix="pass its data set, and its other arguments: rankless.loader(dataset, batch_size=…, shuffle=…)",
        )
    if missing:
        raise DataError(
            expected="a data set with __getitem__ and __len__, or an IterableDataset",
            found=f"{type(dataset).__name__} without {' and '.join(missing)}",
            fix=f"define {' and '.join(missing)} on it",
        )
    if options.shuffle and len(dataset) == 0:
        raise DataError(expected="at least one sample to shuffle", found="0", fix="check how the data set is built")


def _check_numbers(options: LoaderOptions) -> None:
    size, readers = options.batch_size, options.num_workers
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size <= 0):
        raise DataError(
            expected="a batch_size of at least 1: the rows of the whole batch",
            found=repr(size),
            fix="pass the batch size of the one-device script",
        )
    if not isinstance(readers, int) or isinstance(readers, bool) or readers < 0:
        raise DataError(
            expected="a num_workers of at least 0",
            found=repr(readers),
            fix="pass the number of reader processes per rank, or omit it",
        )
    if options.seed is not None and not isinstance(options.seed, int):
        raise DataError(
            expected="a seed that is an integer, or None",
            found=repr(options.seed),
            fix="pass the seed of the generator that the one-device script gives its DataLoader",
        )


def _check_readers(options: LoaderOptions) -> None:
    names = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
    idle = [name for name in names if getattr(options, name)]
    if idle and options.num_workers == 0:
        raise DataError(
            expected=f"reader processes for {' and '.join(idle)}",
            found="num_workers=0",
            fix=f"pass num_workers, or leave out {' and '.join(idle)}",
        )
    if options.timeout < 0:
        raise DataError(
            expected="a timeout of at least 0 seconds", found=repr(options.timeout), fix="leave it out, or pass 0"
        )


def _check_order(options: LoaderOptions) -> None:
    exclusive = [("sampler", "shuffle"), ("seed", "generator")]
    exclusive += [("batch_sampler", name) for name in ("sampler", "shuffle", "drop_last")]
    for one, other in exclusive:
        if getattr(options, one) not in (None, False) and getattr(options, other) not in (None, False):
            raise DataError(
                expected=f"{one} or {other}",
                found="both",
                fix=f"leave out {other}: the {one} decides",
            )
    if options.batch_sampler is not None and options.batch_size != 1:
        raise DataError(
            expected="batch_sampler or batch_size",
            found=f"both: batch_size={options.batch_size}",
            fix="leave out batch_size: the batch_sampler decides",
        )
    if options.batch_size is None and options.drop_last:
        raise DataError(
            expected="a batch_size with drop_last",
            found="batch_size=None: the data set returns whole batches, and none is dropped",
            fix="leave out drop_last, or pass a batch_size",
        )
