"""Find which samples a rank gets, from its sampler or, for a stream, from the content of its batches.

Note [the check has no side effects]: `check_shards` iterates a sampler once more than training does. It restores the
process's generators, the generators that the sampler holds, and the sampler's attributes. It does not restore deeper
state, such as the position in an open file.
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
from rankless.collectives.value_encoding import view_bytes
from rankless.data.batch_tree import PerSampleValues, count_rows, iterate_leaves, mark_per_sample_lists
from rankless.data.loader import Loader
from rankless.data.random_generators import find_generators, preserve_generators
from rankless.data.sample_order import SampleOrder
from rankless.errors import ConfigError

Keys = NDArray[Any]
Kind = Literal["indices", "rows", "whole"]

_SHOWN_SETTINGS = ("rank", "num_replicas", "seed", "epoch")
_WARN_AFTER_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class RankSamples:
    """The samples of one rank in a pass, as sent to the other ranks."""

    kind: Kind
    """Whether `keys` are indices in the data set, digests of rows, or settings of a `rankless.loader`."""
    keys: Keys
    """One key for each sample, in order."""
    batches: int | None
    """Number of batches; None for a sampler of single samples."""
    batch_keys: Keys | None = None
    """Digests of the batches, if `kind` is "rows"."""
    candidates: Keys | int | None = None
    """The indices that the sampler draws from: a number for all indices below it, or None if unknown."""
    samples: int | None = None
    """Size of the data set, also if the sampler draws from a Subset of it."""
    may_drop: int = 0
    """Number of samples that `drop_last` may leave out."""
    is_truncated: bool = False
    """Whether only the first batches were read."""
    source: str = ""
    """Description of the sampler or data set that decides which samples come."""


def find_shard(loader: Any, *, max_batches: int | None, notify: Callable[[str], None]) -> RankSamples:
    """Return this rank's shard of a loader, a sampler or an iterable of batches. Raises `ConfigError` for others."""
    if isinstance(loader, Loader):
        return _describe_loader_shard(loader)
    source = find_index_source(loader)
    _require_repeatable([loader, getattr(loader, "dataset", None), *_list_all_samplers(source)])
    if source is not None:
        return _find_by_indices(loader, source, max_batches)
    return read_row_shard(loader, max_batches=max_batches, notify=notify)


def _require_repeatable(parts: Iterable[Any]) -> None:
    """Raise `ConfigError` for an iterable that the check would exhaust."""
    for number, part in enumerate(parts):
        if isinstance(part, Iterator) or (number == 0 and not hasattr(part, "__iter__")):
            raise ConfigError(
                expected="a DataLoader, a sampler, or an iterable that yields its batches each time it is iterated",
                found=f"{type(part).__name__}, which can be iterated once at most",
                fix="pass the loader itself, not iter(loader); let __iter__ of a stream or sampler start again",
            )


def find_index_source(loader: Any) -> Any:
    """Return what yields the indices of samples, or None if only reading shows them."""
    if isinstance(loader, Sampler):
        return loader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def find_dataset(loader: Any) -> tuple[Any, Any]:
    """Return the data set of a loader or sampler, and the data set under all Subsets."""
    dataset = getattr(loader, "dataset", None)
    for sampler in _list_all_samplers(find_index_source(loader)):
        if dataset is None:
            dataset = getattr(sampler, "dataset", getattr(sampler, "data_source", None))
    base = dataset
    while isinstance(base, Subset):
        base = base.dataset
    return dataset, base


def _describe_loader_shard(loader: Loader[Any]) -> RankSamples:
    order = SampleOrder(loader.dataset, loader.options)
    splitting = [sampler for sampler in order.samplers if getattr(sampler, "num_replicas", 1) > 1]
    return RankSamples(
        kind="whole",
        keys=numpy.asarray([repr(order.settings())]),
        batches=_length_or_none(loader),
        source=f"{type(splitting[0]).__name__} for {splitting[0].num_replicas} ranks" if splitting else "",
    )


def _find_by_indices(loader: Any, source: Any, max_batches: int | None) -> RankSamples:
    dataset, base = find_dataset(loader)
    samples, chain = _length_or_none(base), _list_all_samplers(source)
    limit = max_batches
    if limit is None:
        limit = 1000 + 10 * (_length_or_none(source) or _length_or_none(dataset) or 0)
    with _preserve_state(chain, getattr(loader, "generator", None)):
        for sampler in chain:
            if isinstance(sampler, DistributedSampler):
                sampler.warned_same_epoch = True  # restored at exit, as all attributes are
        batches = list(islice(iter(source), limit + 1))
    if max_batches is None and len(batches) > limit:
        raise ConfigError(
            expected="a sampler that ends",
            found=f"{type(source).__name__}, which continues after {limit} batches",
            fix="pass batches=, the number of batches to check",
        )
    is_truncated = len(batches) > limit
    in_batches = bool(batches) and isinstance(batches[0], list | tuple | Tensor)
    flat = [key for batch in batches[:limit] for key in (batch if in_batches else [batch])]
    return RankSamples(
        kind="indices",
        keys=_to_base_indices(dataset, _to_keys(flat)),
        batches=min(len(batches), limit) if in_batches or isinstance(loader, DataLoader) else None,
        candidates=_list_candidates(dataset),
        samples=samples,
        may_drop=sum(_count_droppable(sampler) for sampler in chain),
        is_truncated=is_truncated,
        source=_describe_samplers(chain),
    )


def read_row_shard(loader: Any, *, max_batches: int | None, notify: Callable[[str], None]) -> RankSamples:
    """Return this rank's shard by the content of its rows. Reads the batches."""
    dataset = getattr(loader, "dataset", None)
    once_more = loader
    if isinstance(loader, DataLoader):
        # Persistent reader processes belong to training: a copy of the loader starts its own.
        once_more = copy.copy(loader)
        vars(once_more)["_iterator"] = None
    rows: list[int] = []
    batches: list[int] = []
    with _preserve_state([loader, dataset], getattr(loader, "generator", None)):
        found = iter(once_more)
        for batch in _warn_if_slow(islice(found, max_batches), notify):
            digests = _digest_rows(batch)
            rows += [_hash_digest(digest) for digest in digests]
            batches.append(_hash_digest(b"".join(digests)))
        is_truncated = max_batches is not None and len(batches) == max_batches
    return RankSamples(
        kind="rows",
        keys=_to_keys(rows),
        batch_keys=_to_keys(batches),
        batches=len(batches),
        is_truncated=is_truncated,
        source=type(loader if dataset is None else dataset).__name__,
    )


def _digest_rows(batch: Any) -> list[bytes]:
    """Return a digest for each sample of a batch: of its rows of all tensors and its values in lists."""
    rows = count_rows(batch)
    digests = [blake2b(digest_size=8) for _ in range(max(rows, 1))]
    for path, leaf in iterate_leaves(mark_per_sample_lists(batch, rows)):
        if isinstance(leaf, PerSampleValues):
            parts = [repr(value).encode() for value in leaf.values]
        elif isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows:
            parts = [_to_bytes(row) for row in leaf]
        elif isinstance(leaf, Tensor):
            parts = [_to_bytes(leaf)] * len(digests)
        else:
            parts = [repr(leaf).encode()] * len(digests)
        for digest, part in zip(digests, parts, strict=True):
            digest.update(path.encode() + b"\0" + part)
    return [digest.digest() for digest in digests]


def _to_bytes(tensor: Tensor) -> bytes:
    return view_bytes(tensor.cpu()).numpy().tobytes() if tensor.numel() else b""


def _warn_if_slow(batches: Iterator[Any], notify: Callable[[str], None]) -> Iterator[Any]:
    """Yield the batches; warn once if reading takes long."""
    start, has_warned = time.monotonic(), False
    for number, batch in enumerate(batches, start=1):
        yield batch
        if not has_warned and time.monotonic() - start > _WARN_AFTER_SECONDS:
            has_warned = True
            notify(f"check_shards reads the whole pass, {number} batches so far; pass batches= to check fewer")


def _list_all_samplers(source: Any) -> list[Any]:
    """Return a sampler and the samplers that it wraps."""
    found: list[Any] = []
    ahead = [source]
    for sampler in ahead:
        if sampler is not None and not any(sampler is known for known in found):
            found.append(sampler)
            ahead += [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
    return found


@contextmanager
def _preserve_state(owners: Iterable[Any], generator: torch.Generator | None) -> Iterator[None]:
    """Restore at exit the generators and the attributes of `owners`."""
    saved = [(owner, dict(vars(owner))) for owner in owners if hasattr(owner, "__dict__")]
    try:
        with preserve_generators(find_generators(generator, *(owner for owner, _ in saved))):
            yield
    finally:
        for owner, attributes in saved:
            vars(owner).clear()
            vars(owner).update(attributes)


def _to_base_indices(dataset: Any, keys: Keys) -> Keys:
    """Return indices in a Subset as indices in the data set under it."""
    while isinstance(dataset, Subset):
        keys = _to_keys(list(dataset.indices))[keys]
        dataset = dataset.dataset
    return keys


def _list_candidates(dataset: Any) -> Keys | int | None:
    count = _length_or_none(dataset)
    if count is None or not isinstance(dataset, Subset):
        return count
    return _to_base_indices(dataset, numpy.arange(count))


def _count_droppable(sampler: Any) -> int:
    return max(1, getattr(sampler, "batch_size", 1) - 1) if getattr(sampler, "drop_last", False) is True else 0


def _describe_samplers(chain: Iterable[Any]) -> str:
    """Describe the innermost sampler with the settings that most often differ between ranks."""
    *_, sampler = chain
    settings = [
        f"{name}={getattr(sampler, name)}" for name in _SHOWN_SETTINGS if isinstance(getattr(sampler, name, None), int)
    ]
    return f"{type(sampler).__name__}({', '.join(settings)})"


def _length_or_none(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None


def _hash_digest(digest: bytes) -> int:
    return int.from_bytes(blake2b(digest, digest_size=8).digest(), "little", signed=True)


def _to_keys(values: list[Any]) -> Keys:
    """Return integers as they are, and any other keys by their `repr`."""
    try:
        return numpy.asarray([operator.index(value) for value in values], dtype=numpy.int64)
    except TypeError:
        return numpy.asarray([repr(value) for value in values])
