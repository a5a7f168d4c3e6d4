"""What one rank gets of the data: which samples, found from its sampler, or, for a stream, from what they hold.

Note [looking changes nothing]: a sampler is iterated once more than training does, so what it draws is put back (the
process's generators, and those that it holds), and so are its attributes. What lies deeper is not: a file's place, say.
"""

import copy
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, Literal

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset

from rankless.collectives import DistributedSampler
from rankless.data.batch_tree import PerSampleValues, count_rows, iterate_leaves, mark_per_sample_lists
from rankless.data.generators import find_generators, preserve_generators
from rankless.data.loader import Loader
from rankless.data.sample_order import SampleOrder
from rankless.errors import ConfigError

Keys = NDArray[Any]
Kind = Literal["indices", "rows", "whole"]

_SHOWN_SETTINGS = ("rank", "num_replicas", "seed", "epoch")
_WARN_AFTER_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class RankShard:
    """The samples of one rank in a pass, as it tells the others."""

    kind: Kind
    """Told by indices in the data set, by digests of rows, or whole batches of a `rankless.loader`."""
    keys: Keys
    """One for each sample, in order."""
    batches: int | None
    """How many; None for a sampler of single samples."""
    batch_keys: Keys | None = None
    """Digests of the batches; of rows only."""
    candidates: Keys | int | None = None
    """The indices from which the sampler is to take: all below a number, or these; None where nobody knows."""
    samples: int | None = None
    """How many the data set has, also where the sampler takes from a Subset of it."""
    may_drop: int = 0
    """So many samples may be left out by `drop_last`."""
    is_truncated: bool = False
    """Whether only the first batches were looked at."""
    source: str = ""
    """What decides which samples come, in words."""


def find_shard(loader: Any, *, most_batches: int | None, notify: Callable[[str], None]) -> RankShard:
    """What this rank gets from a loader, a sampler or any iterable of batches. Raises ConfigError for what is none."""
    if isinstance(loader, Loader):
        return _whole(loader)
    source = find_index_source(loader)
    _require_repeatable([loader, getattr(loader, "dataset", None), *_list_all_samplers(source)])
    if source is not None:
        return _find_by_indices(loader, source, most_batches)
    return read_row_shard(loader, most_batches=most_batches, notify=notify)


def _require_repeatable(parts: Iterable[Any]) -> None:
    """Raise ConfigError for what a look would use up."""
    for number, part in enumerate(parts):
        if isinstance(part, Iterator) or (number == 0 and not hasattr(part, "__iter__")):
            raise ConfigError(
                expected="a DataLoader, a sampler, or what gives batches again each time it is iterated",
                found=f"{type(part).__name__}, which can be iterated once at most",
                fix="pass the loader itself, not iter(loader); let __iter__ of a stream or sampler begin anew",
            )


def find_index_source(loader: Any) -> Any:
    """What gives the indices of samples; None where only reading tells."""
    if isinstance(loader, Sampler):
        return loader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def find_dataset(loader: Any) -> tuple[Any, Any]:
    """The data set that a loader or sampler is made for, and what it is a part of, if it is a Subset."""
    dataset = getattr(loader, "dataset", None)
    for sampler in _list_all_samplers(find_index_source(loader)):
        if dataset is None:
            dataset = getattr(sampler, "dataset", getattr(sampler, "data_source", None))
    base = dataset
    while isinstance(base, Subset):
        base = base.dataset
    return dataset, base


def _whole(loader: Loader[Any]) -> RankShard:
    order = SampleOrder(loader.dataset, loader.options)
    splitting = [sampler for sampler in order.samplers if getattr(sampler, "num_replicas", 1) > 1]
    return RankShard(
        kind="whole",
        keys=numpy.asarray([repr(order.settings())]),
        batches=_length_or_none(loader),
        source=f"{type(splitting[0]).__name__} for {splitting[0].num_replicas} ranks" if splitting else "",
    )


def _find_by_indices(loader: Any, source: Any, most_batches: int | None) -> RankShard:
    dataset, base = find_dataset(loader)
    samples, chain = _length_or_none(base), _list_all_samplers(source)
    most = most_batches
    if most is None:
        most = 1000 + 10 * (_length_or_none(source) or _length_or_none(dataset) or 0)
    with _preserve_state(chain, getattr(loader, "generator", None)):
        for sampler in chain:
            if isinstance(sampler, DistributedSampler):
                sampler.warned_same_epoch = True  # put back afterwards, as all attributes are
        batches = list(islice(iter(source), most + 1))
    if most_batches is None and len(batches) > most:
        raise ConfigError(
            expected="a sampler that ends",
            found=f"{type(source).__name__}, which goes on after {most} batches",
            fix="pass batches=, how many of them to look at",
        )
    is_truncated = len(batches) > most
    in_batches = bool(batches) and isinstance(batches[0], list | tuple | Tensor)
    flat = [key for batch in batches[:most] for key in (batch if in_batches else [batch])]
    return RankShard(
        kind="indices",
        keys=_to_base_indices(dataset, _to_keys(flat)),
        batches=min(len(batches), most) if in_batches or isinstance(loader, DataLoader) else None,
        candidates=_held(dataset),
        samples=samples,
        may_drop=sum(_count_droppable(sampler) for sampler in chain),
        is_truncated=is_truncated,
        source=_describe_samplers(chain),
    )


def read_row_shard(loader: Any, *, most_batches: int | None, notify: Callable[[str], None]) -> RankShard:
    """What this rank gets, by what the rows of its batches hold: reads them."""
    dataset = getattr(loader, "dataset", None)
    once_more = loader
    if isinstance(loader, DataLoader):
        # Reader processes that persist belong to training: a copy starts its own.
        once_more = copy.copy(loader)
        vars(once_more)["_iterator"] = None
    rows: list[int] = []
    batches: list[int] = []
    with _preserve_state([loader, dataset], getattr(loader, "generator", None)):
        found = iter(once_more)
        for batch in _warn_if_slow(islice(found, most_batches), notify):
            digests = _row_digests(batch)
            rows += [_hash_digest(digest) for digest in digests]
            batches.append(_hash_digest(b"".join(digests)))
        is_truncated = most_batches is not None and len(batches) == most_batches
    return RankShard(
        kind="rows",
        keys=_to_keys(rows),
        batch_keys=_to_keys(batches),
        batches=len(batches),
        is_truncated=is_truncated,
        source=type(loader if dataset is None else dataset).__name__,
    )


def _row_digests(batch: Any) -> list[bytes]:
    """A digest for each sample of a batch: of its rows of all tensors, and of its values in lists."""
    rows = count_rows(batch)
    made = [blake2b(digest_size=8) for _ in range(max(rows, 1))]
    for path, leaf in iterate_leaves(mark_per_sample_lists(batch, rows)):
        if isinstance(leaf, PerSampleValues):
            parts = [repr(value).encode() for value in leaf.values]
        elif isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows:
            parts = [_bytes_of(row) for row in leaf]
        elif isinstance(leaf, Tensor):
            parts = [_bytes_of(leaf)] * len(made)
        else:
            parts = [repr(leaf).encode()] * len(made)
        for digest, part in zip(made, parts, strict=True):
            digest.update(path.encode() + b"\0" + part)
    return [digest.digest() for digest in made]


def _bytes_of(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _warn_if_slow(batches: Iterator[Any], notify: Callable[[str], None]) -> Iterator[Any]:
    """The batches; that this takes long is said once."""
    start, gathered = time.monotonic(), False
    for number, batch in enumerate(batches, start=1):
        yield batch
        if not gathered and time.monotonic() - start > _WARN_AFTER_SECONDS:
            gathered = True
            notify(f"check_shards reads the whole pass, {number} batches so far; batches= looks at the first ones only")


def _list_all_samplers(source: Any) -> list[Any]:
    """A sampler, and those that it is made of."""
    found: list[Any] = []
    ahead = [source]
    for sampler in ahead:
        if sampler is not None and not any(sampler is known for known in found):
            found.append(sampler)
            ahead += [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
    return found


@contextmanager
def _preserve_state(owners: Iterable[Any], generator: torch.Generator | None) -> Iterator[None]:
    """Inside, what draws and counts does so in vain."""
    kept = [(owner, dict(vars(owner))) for owner in owners if hasattr(owner, "__dict__")]
    try:
        with preserve_generators(find_generators(generator, *(owner for owner, _ in kept))):
            yield
    finally:
        for owner, attributes in kept:
            vars(owner).clear()
            vars(owner).update(attributes)


def _to_base_indices(dataset: Any, keys: Keys) -> Keys:
    """Indices in a Subset as indices in what it is a part of."""
    while isinstance(dataset, Subset):
        keys = _to_keys(list(dataset.indices))[keys]
        dataset = dataset.dataset
    return keys


def _held(dataset: Any) -> Keys | int | None:
    count = _length_or_none(dataset)
    if count is None or not isinstance(dataset, Subset):
        return count
    return _to_base_indices(dataset, numpy.arange(count))


def _count_droppable(sampler: Any) -> int:
    return max(1, getattr(sampler, "batch_size", 1) - 1) if getattr(sampler, "drop_last", False) is True else 0


def _describe_samplers(chain: Iterable[Any]) -> str:
    """The innermost sampler, with what most often differs between ranks."""
    *_, sampler = chain
    gathered = [
        f"{name}={getattr(sampler, name)}" for name in _SHOWN_SETTINGS if isinstance(getattr(sampler, name, None), int)
    ]
    return f"{type(sampler).__name__}({', '.join(gathered)})"


def _length_or_none(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None


def _hash_digest(digest: bytes) -> int:
    return int.from_bytes(blake2b(digest, digest_size=8).digest(), "little", signed=True)


def _to_keys(values: list[Any]) -> Keys:
    """Whole numbers as such, any other keys by their text."""
    try:
        return numpy.asarray([operator.index(value) for value in values], dtype=numpy.int64)
    except TypeError:
        return numpy.asarray([repr(value) for value in values])
