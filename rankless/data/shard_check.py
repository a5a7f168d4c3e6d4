"""Does every rank get other samples, does each come to somebody, and have all as many batches? See `shards`.

Note [indices or rows]: where samplers give indices, they are compared: exact, and three samples are read at most.
Indices say nothing where each rank has a data set of its own: if ranks have the same index, those three tell
whether it is the same sample. For such data, and for streams, the rows of batches are compared by what they hold. There
equal samples look like one that comes twice, so only a tenth of them and more is taken for a fault.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from rankless.collectives import all_gather_object
from rankless.collectives.call_signature import format_ranks
from rankless.collectives.process_groups import resolve_group
from rankless.data.generators import generators_held, generators_restored, seed_generators
from rankless.data.rank_shares import Keys, Share, data_of, share_by_rows, share_of, source_of
from rankless.data.streams import digest_of
from rankless.errors import ConfigError, RanksDiverged
from rankless.parallel.mesh import Mesh

SHOWN = 5
PROBED = 3
FAULTY_PART = 0.1
"""Of the rows, from which on equal ones are no chance."""
OTHER_SAMPLES = "every rank to get other samples"
FIX = (
    "DataLoader(…, sampler=rankless.collectives.DistributedSampler(dataset)), made after rankless.init(), with one "
    "seed and one set_epoch on all ranks; or rankless.loader"
)
FIX_OF_STREAMS = "let each rank's stream leave out what is for others: every rankless.world_size()-th sample is its own"


@dataclass(frozen=True, kw_only=True)
class ShardsWanted:
    """What the check is to ask for."""

    all_samples: bool = True
    """That each sample comes to some rank."""
    even: bool = True
    """That all ranks have as many batches."""
    batches: int | None = None
    """How many of each rank's batches are looked at; None for all."""


def require_shards(loader: Any, wanted: ShardsWanted, *, mesh: Mesh, notify: Callable[[str], None]) -> None:
    """Raise `RanksDiverged` on every rank unless the data is divided among them."""
    checked = resolve_group(None)
    assert checked is not None
    with checked.report_refusals("check_shards"):
        if wanted.batches is not None and wanted.batches < 1:
            raise ConfigError(
                expected="batches= of at least 1, or None for all",
                found=f"batches={wanted.batches}",
                fix="leave it away, or say how many of each rank's batches to look at",
            )
        share = share_of(loader, most_batches=wanted.batches, notify=notify)
    shares: list[Share] = _from_all(share, mesh)
    _require_one_kind(shares)
    if share.kind == "indices" and not _are_of_one_data_set(loader, shares, mesh, notify):
        if source_of(loader) is loader:
            return  # a sampler alone: there is nothing to read
        share = share_by_rows(loader, most_batches=wanted.batches, notify=notify)
        shares = _from_all(share, mesh)
    if share.kind == "whole":
        _require_whole(shares)
    elif share.kind == "rows":
        _require_other_rows(shares, notify)
    else:
        _require_other_indices(shares, notify)
        if wanted.all_samples:
            _require_all(shares)
    if wanted.even:
        _require_even(shares)


def _from_all(mine: Any, mesh: Mesh) -> list[Any]:
    told: list[Any] = [None] * mesh.size
    all_gather_object(told, mine)
    return told


def _are_of_one_data_set(loader: Any, shares: Sequence[Share], mesh: Mesh, notify: Callable[[str], None]) -> bool:
    """Whether an index means the same sample on every rank. Collective; reads a few samples."""
    if any(share.samples != shares[0].samples for share in shares):
        return False
    keys, counts = numpy.unique(numpy.concatenate([numpy.unique(share.keys) for share in shares]), return_counts=True)
    shared = keys[counts > 1]
    among = shared if len(shared) else keys
    probes = [among[place] for place in sorted({0, len(among) // 2, len(among) - 1})] if len(among) else []
    _, base = data_of(loader)
    if not hasattr(base, "__getitem__") or among.dtype != numpy.int64:
        return True
    found: list[list[bytes]] = _from_all([_probe(base, int(index)) for index in probes], mesh)
    differing = [
        (rank, place) for rank, read in enumerate(found) for place, one in enumerate(read) if one != found[0][place]
    ]
    if differing and not len(shared):
        rank, place = differing[0]
        notify(
            f"index {probes[place]} of the data set holds another sample on rank {rank} than on rank 0: ranks that "
            "divide indices may then have the same samples (sort lists of files, and read them alike on every rank)"
        )
        return True
    return not differing


def _probe(dataset: Any, index: int) -> bytes:
    """A digest of a sample, with the same random numbers on every rank."""
    held = generators_held(dataset)
    with generators_restored(held):
        seed_generators(index, held)
        return digest_of(dataset[index])


def _require_one_kind(shares: Sequence[Share]) -> None:
    kinds = {"indices": "a sampler's", "rows": "batches", "whole": "a rankless.loader"}
    if any(share.kind != shares[0].kind for share in shares):
        raise RanksDiverged(
            expected="the same kind of loader on every rank",
            found="; ".join(f"rank {rank}: {kinds[share.kind]}" for rank, share in enumerate(shares)),
            fix="build it by the same lines on every rank",
        )


def _require_whole(shares: Sequence[Share]) -> None:
    """A `rankless.loader` gives each rank its rows of every batch, if the batches are the same."""
    if shares[0].maker:
        raise RanksDiverged(
            expected="a rankless.loader of all samples: it gives each rank its own rows of every batch itself",
            found=f"one with a sampler that has divided them already: {shares[0].maker}",
            fix="leave the sampler away, and pass shuffle=True",
        )
    other = [rank for rank, share in enumerate(shares) if share.keys[0] != shares[0].keys[0]]
    if other:
        raise RanksDiverged(
            expected=f"a rankless.loader made as on rank 0: {shares[0].keys[0]}",
            found=f"rank {other[0]}: {shares[other[0]].keys[0]}",
            fix="build it by the same lines on every rank",
        )


def _require_other_indices(shares: Sequence[Share], notify: Callable[[str], None]) -> None:
    own = [numpy.unique(share.keys) for share in shares]
    if any(len(unique) < len(share.keys) for unique, share in zip(own, shares, strict=True)):
        _require_other_draws(shares)
        return
    keys, counts = numpy.unique(numpy.concatenate(own), return_counts=True)
    repeated = keys[counts > 1]
    if not len(repeated):
        return
    extra, total = int((counts - 1).sum()), shares[0].samples or len(keys)
    if _is_padding(shares, repeated, extra):
        notify(
            f"{extra} of {total} samples come twice, by padding: pass drop_last=True to the sampler, or use "
            "rankless.collectives.DistributedSampler, which repeats none"
        )
        return
    named = [
        f"{key} ({format_ranks([rank for rank, unique in enumerate(own) if numpy.isin(key, unique)])})"
        for key in repeated[:SHOWN].tolist()
    ]
    raise RanksDiverged(
        expected=f"{OTHER_SAMPLES}: no index of the data set on two of them",
        found=f"{len(repeated)} of {total} come to several: {_listed(named, len(repeated))}; {_makers(shares)}",
        fix=FIX,
    )


def _is_padding(shares: Sequence[Share], repeated: Keys, extra: int) -> bool:
    """Whether samples are repeated as torch does it: fewer than there are ranks, each as the last of some rank."""
    lasts = [share.keys[-1] for share in shares if len(share.keys)]
    even = len({len(share.keys) for share in shares}) == 1
    return even and extra < len(shares) and bool(numpy.isin(repeated, lasts).all())


def _require_other_draws(shares: Sequence[Share]) -> None:
    """Ranks that draw with replacement may have the same samples, but not all of them in the same order."""
    for rank, share in enumerate(shares):
        alike = [other for other in range(rank) if numpy.array_equal(shares[other].keys, share.keys)]
        if alike:
            raise RanksDiverged(
                expected=f"{OTHER_SAMPLES}: other draws, where they draw with replacement",
                found=f"ranks {alike[0]} and {rank} draw the same {len(share.keys)}: {_makers(shares)}",
                fix="give each rank's sampler a generator seeded by its rank: torch.Generator().manual_seed(seed + "
                "rankless.rank())",
            )


def _require_all(shares: Sequence[Share]) -> None:
    keys = [share.keys for share in shares]
    with_replacement = any(len(numpy.unique(own)) < len(own) for own in keys)
    if with_replacement or any(share.cut or share.keys.dtype != numpy.int64 for share in shares):
        return
    held: list[Keys] = []
    for share in shares:
        if share.holds is None:
            return
        held.append(numpy.arange(share.holds) if isinstance(share.holds, int) else share.holds)
    wanted = numpy.unique(numpy.concatenate(held))
    missing = numpy.setdiff1d(wanted, numpy.concatenate(keys))
    if len(missing) > sum(share.drops for share in shares):
        named = list(map(str, missing[:SHOWN].tolist()))
        raise RanksDiverged(
            expected="every sample to come to some rank",
            found=f"{len(missing)} of {len(wanted)} come to none: {_listed(named, len(missing))}; {_makers(shares)}",
            fix=f"{FIX}; or all_samples=False, where the script means to leave some out",
        )


def _require_other_rows(shares: Sequence[Share], notify: Callable[[str], None]) -> None:
    """As for indices, by what rows hold; by whole batches, where a rank's own rows are often equal."""
    often_equal = any(len(numpy.unique(share.keys)) < (1 - FAULTY_PART) * len(share.keys) for share in shares)
    what = "batches" if often_equal else "samples"
    known: dict[int, tuple[int, int]] = {}
    equal: list[str] = []
    parts: list[float] = []
    for rank, share in enumerate(shares):
        sequence = share.batch_keys if often_equal else share.keys
        places = {key: place for place, key in enumerate([] if sequence is None else sequence.tolist())}
        again = [key for key in places if key in known]
        parts.append(len(again) / max(1, len(places)))
        equal += [f"{places[key]} of rank {rank} is {known[key][1]} of rank {known[key][0]}" for key in again]
        known |= {key: (rank, place) for key, place in places.items() if key not in known}
    told = f"{len(equal)} {what} of one rank are also another's: {_listed(equal, len(equal))} (each rank's from 0)"
    if max(parts) >= FAULTY_PART:
        raise RanksDiverged(expected=OTHER_SAMPLES, found=told, fix=FIX_OF_STREAMS)
    if equal:
        notify(f"{told}. They are equal samples in the data, or shards that overlap")


def _require_even(shares: Sequence[Share]) -> None:
    counts = [share.batches for share in shares]
    if any(count != counts[0] for count in counts):
        raise RanksDiverged(
            expected="as many batches on every rank: DistributedDataParallel waits for all of them in each step",
            found="; ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts)),
            fix="pass drop_last=True to the sampler; or even=False, and loop inside torch.distributed.algorithms.Join",
        )


def _makers(shares: Sequence[Share]) -> str:
    makers = dict.fromkeys(share.maker for share in shares)
    ranks = {maker: [rank for rank, share in enumerate(shares) if share.maker == maker] for maker in makers}
    return "; ".join(f"{format_ranks(ranks[maker])}: {maker}" for maker in makers)


def _listed(named: Sequence[str], count: int) -> str:
    return ", ".join(named[:SHOWN]) + (f" and {count - SHOWN} more" if count > SHOWN else "")
