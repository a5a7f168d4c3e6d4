"""From a sampler's indices to a request for each batch: this rank's samples, or all of them.

Note [the draws of a DataLoader]: PyTorch's own `DataLoader`, `RandomSampler` and `BatchSampler` produce the order.
Every random number therefore comes from the same generator at the same moment as in the plain script. Draws in
`__iter__` of a sampler and the base seed happen when iteration starts. The permutation is drawn when the first batch is
requested.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from rankless.data.generators import (
    Generator,
    derive_sample_seed,
    find_changed_generators,
    get_process_states,
    set_process_states,
)
from rankless.data.loader_position import GeneratorSnapshot, Pass, require_same_batches
from rankless.data.sample_reader import BatchRequest
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import split_lengths

_TORCH_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw nothing from the process's generators after their first index."""


class RequestSampler(Sampler[Any]):
    """Yields the requests of a pass; the inner `DataLoader` uses it as its sampler.

    `current` is the pass of the next iteration. `in_batches` is False if the sampler yields single keys, each for a
    whole batch that the data set returns.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        mesh: Mesh,
        is_split: bool,
        in_batches: bool,
        generators: Mapping[str, Generator],
    ) -> None:
        self._sampler = sampler
        self._mesh = mesh
        self._is_split = is_split
        self._in_batches = in_batches
        self._generators = generators
        self._tracks_draws = type(getattr(sampler, "sampler", sampler)) not in _TORCH_SAMPLERS
        self.current: Pass | None = None

    def __iter__(self) -> Iterator[BatchRequest]:
        assert self.current is not None
        # Not inside the generator below: a sampler whose __iter__ is no generator function draws here.
        return self._iterate_requests(iter(self._sampler), self.current)

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
            first = False
            yield self._make_request(key, current.seed)

    def _skip_to_position(self, keys: Iterator[Any], current: Pass, first: GeneratorSnapshot) -> Iterator[BatchRequest]:
        """Skip the batches that the interrupted pass yielded, and yield requests for those it had only started."""
        now = get_process_states()
        first.restore(self._generators)
        skipped = [self._make_request(key, current.seed) for key in islice(keys, max(1, current.position))]
        set_process_states(now)
        require_same_batches(current, [request.digest for request in skipped[: current.position]])
        yield from skipped[current.position :]

    def _make_request(self, key: Any, seed: int | None) -> BatchRequest:
        mesh = self._mesh
        if not self._in_batches:
            return BatchRequest(indices=[key], rows=None, is_split=False, digest=_digest_indices([key], seed))
        indices = list(key)
        rows = len(indices)
        digest = _digest_indices(indices, seed)
        is_split = self._is_split and rows >= mesh.size
        if is_split:
            lengths = split_lengths(rows, mesh.size)
            start = sum(lengths[: mesh.rank])
            indices = indices[start : start + lengths[mesh.rank]]
        seeds = None if seed is None else [derive_sample_seed(seed, index) for index in indices]
        return BatchRequest(indices=indices, rows=rows, is_split=is_split, digest=digest, sample_seeds=seeds)


def _digest_indices(indices: list[Any], seed: int | None) -> bytes:
    plain = [index.tolist() if isinstance(index, Tensor) else index for index in indices]
    return blake2b(repr((plain, seed)).encode(), digest_size=16).digest()
