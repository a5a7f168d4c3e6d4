"""Check that ranks get different samples, that each sample comes to a rank, and that all ranks have as many batches.

Note [indices or rows]: if samplers yield indices, the check compares these. That is exact and reads at most three
samples. Indices mean nothing if each rank has a data set of its own. If ranks have the same index, the three samples
show whether it is the same sample. For such data, and for streams, the check compares the content of rows. Equal
samples then look like one sample that comes twice, so the check fails only from a tenth of the samples on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from rankless.collectives import all_gather_object
from rankless.collectives.checked_process_group import resolve_group
from rankless.data.sample_reader import digest_sample
from rankless.data.samples_of_rank import (
    Keys,
    RankSamples,
    find_dataset,
    find_index_source,
    find_shard,
    read_row_shard,
)
from rankless.errors import ConfigError, RanksDiverged
from rankless.parallel.mesh import Mesh
from rankless.records.number_formatting import format_ranks

SHOWN = 5
FAULTY_FRACTION = 0.1
"""Fraction of equal rows from which on the check fails."""
DISJOINT_SAMPLES = "every rank to get different samples"
FIX = (
    "DataLoader(…, sampler=rankless.collectives.DistributedSampler(dataset)) after rankless.init(), with the same seed "
    "and the same set_epoch on all ranks; or rankless.loader"
)
STREAM_FIX = "let each rank's stream yield only its own samples, for example every rankless.world_size()-th one"


@dataclass(frozen=True, kw_only=True)
class ShardCheckOptions:
    """What `check_shards` requires."""

    all_samples: bool = True
    """Each sample must come to a rank."""
    even: bool = True
    """All ranks must have as many batches."""
    batches: int | None = None
    """Number of batches to read on each rank; None for all."""


def require_shards(loader: Any, options: ShardCheckOptions, *, mesh: Mesh, notify: Callable[[str], None]) -> None:
    """Raise `RanksDiverged` on every rank unless the ranks divide the data."""
    checked = resolve_group(None)
    assert checked is not None
    with checked.report_refusals("check_shards"):
        if options.batches is not None and options.batches < 1:
            raise ConfigError(
                expected="batches= of at least 1, or None for all",
                found=f"batches={options.batches}",
                fix="omit it, or pass the number of batches to check on each rank",
            )
        shard = find_shard(loader, max_batches=options.batches, notify=notify)
    shards: list[RankSamples] = _gather_from_all(shard, mesh)
    _require_same_kind(shards)
    if shard.kind == "indices" and not _is_one_dataset(loader, shards, mesh, notify):
        if find_index_source(loader) is loader:
            return  # a sampler alone: there is nothing to read
        shard = read_row_shard(loader, max_batches=options.batches, notify=notify)
        shards = _gather_from_all(shard, mesh)
    if shard.kind == "whole":
        _require_same_loader(shards)
    elif shard.kind == "rows":
        _require_disjoint_rows(shards, notify)
    else:
        _require_disjoint_indices(shards, notify)
        if options.all_samples:
            _require_complete(shards)
    if options.even:
        _require_even(shards)


def _gather_from_all(value: Any, mesh: Mesh) -> list[Any]:
    gathered: list[Any] = [None] * mesh.size
    all_gather_object(gathered, value)
    return gathered


def _is_one_dataset(loader: Any, shards: Sequence[RankSamples], mesh: Mesh, notify: Callable[[str], None]) -> bool:
    """Whether an index means the same sample on every rank. Collective; reads a few samples."""
    if any(shard.samples != shards[0].samples for shard in shards):
        return False
    keys, counts = numpy.unique(numpy.concatenate([numpy.unique(shard.keys) for shard in shards]), return_counts=True)
    shared = keys[counts > 1]
    among = shared if len(shared) else keys
    probes = [among[probe] for probe in sorted({0, len(among) // 2, len(among) - 1})] if len(among) else []
    _, base = find_dataset(loader)
    if not hasattr(base, "__getitem__") or among.dtype != numpy.int64:
        return True
    found: list[list[bytes]] = _gather_from_all(
        [digest_sample(base, int(index), seed=int(index)) for index in probes], mesh
    )
    differing = [
        (rank, probe) for rank, read in enumerate(found) for probe, one in enumerate(read) if one != found[0][probe]
    ]
    if differing and not len(shared):
        rank, probe = differing[0]
        notify(
            f"index {probes[probe]} of the data set holds another sample on rank {rank} than on rank 0: ranks that "
            "divide indices may then get the same samples (read the same sorted list of files on every rank)"
        )
        return True
    return not differing


def _require_same_kind(shards: Sequence[RankSamples]) -> None:
    kinds = {"indices": "a sampler's", "rows": "batches", "whole": "a rankless.loader"}
    if any(shard.kind != shards[0].kind for shard in shards):
        raise RanksDiverged(
            expected="the same kind of loader on every rank",
            found="; ".join(f"rank {rank}: {kinds[shard.kind]}" for rank, shard in enumerate(shards)),
            fix="build it with the same lines on every rank",
        )


def _require_same_loader(shards: Sequence[RankSamples]) -> None:
    """Require equal `rankless.loader`s. Each of them gives its rank its rows of every batch."""
    if shards[0].source:
        raise RanksDiverged(
            expected="a rankless.loader of all samples: it gives each rank its own rows of every batch",
            found=f"one with a sampler that already divides them: {shards[0].source}",
            fix="omit the sampler, and pass shuffle=True",
        )
    other = [rank for rank, shard in enumerate(shards) if shard.keys[0] != shards[0].keys[0]]
    if other:
        raise RanksDiverged(
            expected=f"a rankless.loader with the settings of rank 0: {shards[0].keys[0]}",
            found=f"rank {other[0]}: {shards[other[0]].keys[0]}",
            fix="build it with the same lines on every rank",
        )


def _require_disjoint_indices(shards: Sequence[RankSamples], notify: Callable[[str], None]) -> None:
    own = [numpy.unique(shard.keys) for shard in shards]
    if any(len(unique) < len(shard.keys) for unique, shard in zip(own, shards, strict=True)):
        _require_distinct_draws(shards)
        return
    keys, counts = numpy.unique(numpy.concatenate(own), return_counts=True)
    repeated = keys[counts > 1]
    if not len(repeated):
        return
    extra, total = int((counts - 1).sum()), shards[0].samples or len(keys)
    if _is_padding(shards, repeated, extra):
        notify(
            f"{extra} of {total} samples come twice because of padding: pass drop_last=True to the sampler, or use "
            "rankless.collectives.DistributedSampler, which does not pad"
        )
        return
    named = [
        f"{key} ({format_ranks([rank for rank, unique in enumerate(own) if numpy.isin(key, unique)])})"
        for key in repeated[:SHOWN].tolist()
    ]
    raise RanksDiverged(
        expected=f"{DISJOINT_SAMPLES}: no index of the data set on two ranks",
        found=f"{len(repeated)} of {total} come to several ranks: {_list_examples(named, len(repeated))}; "
        f"{_describe_sources(shards)}",
        fix=FIX,
    )


def _is_padding(shards: Sequence[RankSamples], repeated: Keys, extra: int) -> bool:
    """Whether samples are repeated as torch pads: fewer than ranks, each as the last sample of some rank."""
    lasts = [shard.keys[-1] for shard in shards if len(shard.keys)]
    even = len({len(shard.keys) for shard in shards}) == 1
    return even and extra < len(shards) and bool(numpy.isin(repeated, lasts).all())


def _require_distinct_draws(shards: Sequence[RankSamples]) -> None:
    """Require different draws. Ranks that draw with replacement may share samples, but not their whole order."""
    for rank, shard in enumerate(shards):
        identical = [other for other in range(rank) if numpy.array_equal(shards[other].keys, shard.keys)]
        if identical:
            raise RanksDiverged(
                expected=f"{DISJOINT_SAMPLES}: different draws if they draw with replacement",
                found=f"ranks {identical[0]} and {rank} draw the same {len(shard.keys)}: {_describe_sources(shards)}",
                fix="give each rank's sampler a generator seeded by its rank: torch.Generator().manual_seed(seed + "
                "rankless.rank())",
            )


def _require_complete(shards: Sequence[RankSamples]) -> None:
    keys = [shard.keys for shard in shards]
    with_replacement = any(len(numpy.unique(own)) < len(own) for own in keys)
    if with_replacement or any(shard.is_truncated or shard.keys.dtype != numpy.int64 for shard in shards):
        return
    candidates: list[Keys] = []
    for shard in shards:
        if shard.candidates is None:
            return
        candidates.append(numpy.arange(shard.candidates) if isinstance(shard.candidates, int) else shard.candidates)
    expected_keys = numpy.unique(numpy.concatenate(candidates))
    missing = numpy.setdiff1d(expected_keys, numpy.concatenate(keys))
    if len(missing) > sum(shard.may_drop for shard in shards):
        named = list(map(str, missing[:SHOWN].tolist()))
        raise RanksDiverged(
            expected="every sample to come to some rank",
            found=f"{len(missing)} of {len(expected_keys)} come to no rank: {_list_examples(named, len(missing))}; "
            f"{_describe_sources(shards)}",
            fix=f"{FIX}; or all_samples=False if the script leaves some out on purpose",
        )


def _require_disjoint_rows(shards: Sequence[RankSamples], notify: Callable[[str], None]) -> None:
    """Compare shards by content of rows, or of whole batches if rows of one rank are often equal."""
    often_equal = any(len(numpy.unique(shard.keys)) < (1 - FAULTY_FRACTION) * len(shard.keys) for shard in shards)
    what = "batches" if often_equal else "samples"
    known: dict[int, tuple[int, int]] = {}
    equal: list[str] = []
    fractions: list[float] = []
    for rank, shard in enumerate(shards):
        sequence = shard.batch_keys if often_equal else shard.keys
        positions = {key: position for position, key in enumerate([] if sequence is None else sequence.tolist())}
        repeated = [key for key in positions if key in known]
        fractions.append(len(repeated) / max(1, len(positions)))
        equal += [f"{positions[key]} of rank {rank} is {known[key][1]} of rank {known[key][0]}" for key in repeated]
        known |= {key: (rank, position) for key, position in positions.items() if key not in known}
    examples = _list_examples(equal, len(equal))
    found = f"{len(equal)} {what} of one rank are also on another rank: {examples} (counted from 0 on each rank)"
    if max(fractions) >= FAULTY_FRACTION:
        raise RanksDiverged(expected=DISJOINT_SAMPLES, found=found, fix=STREAM_FIX)
    if equal:
        notify(f"{found}. Either the data has equal samples, or the shards overlap")


def _require_even(shards: Sequence[RankSamples]) -> None:
    counts = [shard.batches for shard in shards]
    if any(count != counts[0] for count in counts):
        raise RanksDiverged(
            expected="the same number of batches on every rank: DistributedDataParallel waits for all in each step",
            found="; ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts)),
            fix="pass drop_last=True to the sampler; or even=False, and loop inside torch.distributed.algorithms.Join",
        )


def _describe_sources(shards: Sequence[RankSamples]) -> str:
    sources = dict.fromkeys(shard.source for shard in shards)
    ranks = {source: [rank for rank, shard in enumerate(shards) if shard.source == source] for source in sources}
    return "; ".join(f"{format_ranks(ranks[source])}: {source}" for source in sources)


def _list_examples(named: Sequence[str], count: int) -> str:
    return ", ".join(named[:SHOWN]) + (f" and {count - SHOWN} more" if count > SHOWN else "")
