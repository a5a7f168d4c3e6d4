"""From a sampler's indices to a request for each batch: this rank's samples, or all of them.

Note [the draws of a DataLoader]: PyTorch's own `DataLoader`, `RandomSampler` and `BatchSampler` produce the order.
Every random number therefore comes from the same generator at the same moment as in the plain script. Draws in
`__iter__` of a sampler and the base seed happen when iteration starts. The permutation is drawn when the first batch is
requested.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

from torch import Tensor
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from rankless.data.loader_position import GeneratorSnapshot, Pass, require_same_batches
from rankless.data.random_generators import (
    Generator,
    derive_sample_seed,
    find_changed_generators,
    get_process_states,
    set_process_states,
)
from rankless.data.sample_reader import BatchRequest, Division, WholeBatch
from rankless.parallel.batch_division import BatchDivision
from rankless.parallel.mesh import Mesh

_TORCH_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw nothing from the process's generators after their first index."""


class ReadingDecision:
    """Whether each rank reads only its own samples.

    With `is_probed` a probe of the `collate_fn` decides: `is_split` is None until then, and all ranks read whole
    batches. See Note [probed collation].
    """

    def __init__(self, *, is_split: bool | None, is_probed: bool, compares_ranks: bool = False) -> None:
        self.is_split = is_split
        self.is_probed = is_probed
        self.compares_ranks = compares_ranks
        """Whether all ranks read a sample of the loader's first batch, to compare their data sets."""


class RequestSampler(Sampler[Any]):
    """Yields the requests of a pass; the inner `DataLoader` uses it as its sampler.

    `current` is the pass of the next iteration. `in_batches` is False if the sampler yields single keys, each for a
    whole batch that the data set returns. With a probed decision, or with `keeps_whole`, `pending` holds the requests
    whose batches have not come back yet.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        mesh: Mesh,
        decision: ReadingDecision,
        in_batches: bool,
        generators: Mapping[str, Generator],
        keeps_whole: bool = False,
    ) -> None:
        self._sampler = sampler
        self.keeps_whole = keeps_whole
        self._batch_division = BatchDivision.of(mesh)
        self._decision = decision
        self._in_batches = in_batches
        self._generators = generators
        self._tracks_draws = type(getattr(sampler, "sampler", sampler)) not in _TORCH_SAMPLERS
        self.current: Pass | None = None
        self.pending: deque[BatchRequest] = deque()
        self._rest: Iterator[BatchRequest] = iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        assert self.current is not None
        # Not inside the generator below: a sampler whose __iter__ is no generator function draws here.
        self._rest = self._iterate_requests(iter(self._sampler), self.current)
        self.pending.clear()
        return self._record(self._rest) if self._decision.is_probed or self.keeps_whole else self._rest

    def iterate_again(self, mesh: Mesh) -> Iterator[BatchRequest]:
        """Yield the pending requests again and then the rest of the pass, divided over another mesh."""
        self._batch_division = BatchDivision.of(mesh)
        again = [self._divide_again(request) for request in self.pending]
        self.pending.clear()
        return chain(self._record(iter(again)), self._record(self._rest))

    def _divide_again(self, request: BatchRequest) -> BatchRequest:
        if not self._in_batches or self.current is None:
            return request
        whole = request.whole or request.division
        return self._make_request(request.indices if whole is None else whole.indices, self.current.seed)

    def iterate_whole(self) -> Iterator[BatchRequest]:
        """Yield the pending requests again and then the rest of the pass, all of them for whole batches."""
        self._decision.is_split = False
        again = [make_whole(request) for request in self.pending]
        self.pending.clear()
        yield from self._record(iter(again))
        yield from self._record(self._rest)

    def _record(self, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
        for request in requests:
            self.pending.append(request)
            yield request

    def _iterate_requests(self, keys: Iterator[Any], current: Pass) -> Iterator[BatchRequest]:
        if current.resumed and current.first is not None:
            yield from self._skip_to_position(keys, current, current.first)
        else:
            current.first = GeneratorSnapshot.now(self._generators)
        first = True
        while True:
            before = get_process_states() if self._tracks_draws and not first else None
            try:
                key = next(keys)
            except StopIteration:
                return
            if before is not None:
                current.interleaved_draws |= find_changed_generators(before, get_process_states())
            request = self._make_request(key, current.seed)
            if first and current.number == 0 and self._decision.compares_ranks:
                index = next(iter(key), None) if self._in_batches else key
                request = replace(request, common=(index, derive_sample_seed(current.seed or 0, index)))
            first = False
            yield request

    def _skip_to_position(self, keys: Iterator[Any], current: Pass, first: GeneratorSnapshot) -> Iterator[BatchRequest]:
        """Skip the batches that the interrupted pass yielded, and yield requests for those it had only started."""
        now = get_process_states()
        first.restore(self._generators)
        skipped = [self._make_request(key, current.seed) for key in islice(keys, max(1, current.position))]
        set_process_states(now)
        require_same_batches(current, [request.digest for request in skipped[: current.position]])
        yield from skipped[current.position :]

    def _make_request(self, key: Any, seed: int | None) -> BatchRequest:
        batch_division = self._batch_division
        if not self._in_batches:
            return BatchRequest(indices=[key], rows=None, is_split=False, digest=_digest_indices([key], seed))
        indices = list(key)
        rows = len(indices)
        digest = _digest_indices(indices, seed)
        decision, divisible = self._decision, batch_division.count > 1 and batch_division.divides(rows)
        is_split = bool(decision.is_split) and divisible
        division = None
        if divisible and decision.is_probed and decision.is_split is not False:
            division = Division(
                indices=indices,
                lengths=batch_division.split(rows),
                rank=batch_division.own_part,
                sample_seeds=_derive_seeds(seed, indices),
            )
        whole = None
        if is_split and self.keeps_whole:
            whole = WholeBatch(indices=indices, sample_seeds=_derive_seeds(seed, indices))
        if is_split:
            lengths, own = batch_division.split(rows), batch_division.own_part
            start = sum(lengths[:own])
            indices = indices[start : start + lengths[own]]
        return BatchRequest(
            indices=indices,
            rows=rows,
            is_split=is_split,
            digest=digest,
            sample_seeds=_derive_seeds(seed, indices),
            division=division,
            whole=whole,
        )


def _derive_seeds(seed: int | None, indices: list[Any]) -> list[int] | None:
    return None if seed is None else [derive_sample_seed(seed, index) for index in indices]


def make_whole(request: BatchRequest) -> BatchRequest:
    """Return the request for all samples of its batch, without another probe."""
    known = request.whole or request.division
    if known is None:
        return request
    indices, seeds = known.indices, known.sample_seeds
    return replace(request, indices=indices, sample_seeds=seeds, is_split=False, division=None, common=None)


def _digest_indices(indices: list[Any], seed: int | None) -> bytes:
    plain = [index.tolist() if isinstance(index, Tensor) else index for index in indices]
    return blake2b(repr((plain, seed)).encode(), digest_size=16).digest()
