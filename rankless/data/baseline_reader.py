"""Read a loader's batches with PyTorch's `DataLoader` alone, in the runs on one worker that `rankless verify` records.

Note [plain reading]: `verify` compares a run on N workers with a run on one. If both read their batches with the same
code, a fault of that code is in both, and no comparison finds it. The run on one worker therefore hands the user's
data set and collate function to `DataLoader` itself. Two things stay shared, because they define which samples are
meant: the order, which PyTorch's samplers draw, and with reading="split" the seed of each sample, which replaces
`DataLoader`'s random numbers on one device too. Streams and resumed passes keep the loader's own reader.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from rankless.data.batch_requests import RequestSampler
from rankless.data.generators import Generator, find_generators, preserve_generators, seed_generators
from rankless.data.sample_reader import BatchRead, BatchRequest


class PlainKeys(Sampler[Any]):
    """The keys of each request, in the form in which `DataLoader` passes them to the data set.

    With `is_seeded` a key is a pair: the data set's own key, and the sample's seed. `requests` holds the requests whose
    batches have not been yielded yet.
    """

    def __init__(self, requests: RequestSampler, *, in_batches: bool, is_seeded: bool) -> None:
        self.requests: deque[BatchRequest] = deque()
        self._source = requests
        self._in_batches = in_batches
        self._is_seeded = is_seeded

    def __iter__(self) -> Iterator[Any]:
        self.requests.clear()
        # Not inside the generator below: a sampler may draw when iteration starts.
        return self._iterate_keys(iter(self._source))

    def _iterate_keys(self, requests: Iterator[BatchRequest]) -> Iterator[Any]:
        for request in requests:
            self.requests.append(request)
            keys: list[Any] = list(request.indices)
            if self._is_seeded and request.sample_seeds is not None:
                keys = list(zip(keys, request.sample_seeds, strict=True))
            yield keys if self._in_batches else keys[0]


class SeededSamples(Dataset[Any]):
    """The user's data set, with the process's generators seeded for each sample, as reading="split" promises."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._generators: dict[str, Generator] | None = None

    def __getitem__(self, key: tuple[Any, int]) -> Any:
        index, seed = key
        if self._generators is None:
            self._generators = find_generators(self.dataset)
        with preserve_generators(self._generators):
            seed_generators(seed, self._generators)
            return self.dataset[index]


class PlainReader:
    """One `DataLoader` over the user's data set, and the request of each of its batches."""

    def __init__(self, loader: "DataLoader[Any]", keys: PlainKeys) -> None:
        self._loader = loader
        self._keys = keys

    def __iter__(self) -> Iterator[BatchRead]:
        # Iteration starts here, not in the generator below: `DataLoader` draws its base seed at this moment.
        return self._pair(iter(self._loader))

    def _pair(self, batches: Iterator[Any]) -> Iterator[BatchRead]:
        for data in batches:
            yield BatchRead(data=data, request=self._keys.requests.popleft())
