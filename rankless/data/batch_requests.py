"""From a sampler's indices to a request for each batch: of this rank's part, or of the whole.

Note [the same draws]: PyTorch's own DataLoader, RandomSampler and BatchSampler make the order here, so every
random number is drawn from the same generator at the same moment as in the plain script: what a sampler draws in
`__iter__` and the base seed when an iteration begins, the permutation when the first batch is asked for.
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
from rankless.parallel.placement import split_lengths

_TORCH_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""They draw nothing from the process's generators after their first index."""


class RequestSampler(Sampler[Any]):
    """The requests of a pass. `current` is the pass that the next iteration is; `in_batches` is False where the
    sampler gives single keys, each of a whole batch that the data set makes.
    """

    def __init__(
        self, sampler: Iterable[Any], *, mesh: Mesh, is_split: bool, in_batches: bool, held: Mapping[str, Generator]
    ) -> None:
        self._sampler = sampler
        self._mesh = mesh
        self._is_split = is_split
        self._in_batches = in_batches
        self._held = held
        self._tracks_draws = type(getattr(sampler, "sampler", sampler)) not in _TORCH_SAMPLERS
        self.current: Pass | None = None

    def __iter__(self) -> Iterator[BatchRequest]:
        assert self.current is not None
        # Not inside the generator below: a sampler that is no generator function draws here.
        return self._requests(iter(self._sampler), self.current)

    def _requests(self, keys: Iterator[Any], current: Pass) -> Iterator[BatchRequest]:
        if current.resumed and current.first is not None:
            yield from self._skip_to_position(keys, current, current.first)
        else:
            current.first = GeneratorSnapshot.now(self._held)
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
            yield self._request(key, current.seed)

    def _skip_to_position(self, keys: Iterator[Any], current: Pass, first: GeneratorSnapshot) -> Iterator[BatchRequest]:
        """Go to where the pass was; what was begun and not handed out is requested again."""
        now = get_process_states()
        first.restore(self._held)
        skipped = [self._request(key, current.seed) for key in islice(keys, max(1, current.position))]
        set_process_states(now)
        require_same_batches(current, [request.digest for request in skipped[: current.position]])
        yield from skipped[current.position :]

    def _request(self, key: Any, seed: int | None) -> BatchRequest:
        mesh = self._mesh
        if not self._in_batches:
            return BatchRequest(indices=[key], rows=None, is_split=False, digest=_digest([key], seed))
        indices = list(key)
        rows = len(indices)
        digest = _digest(indices, seed)
        is_split = self._is_split and rows >= mesh.size
        if is_split:
            lengths = split_lengths(rows, mesh.size)
            start = sum(lengths[: mesh.rank])
            indices = indices[start : start + lengths[mesh.rank]]
        seeds = None if seed is None else [derive_sample_seed(seed, index) for index in indices]
        return BatchRequest(indices=indices, rows=rows, is_split=is_split, digest=digest, sample_seeds=seeds)


def _digest(indices: list[Any], seed: int | None) -> bytes:
    plain = [index.tolist() if isinstance(index, Tensor) else index for index in indices]
    return blake2b(repr((plain, seed)).encode(), digest_size=16).digest()
