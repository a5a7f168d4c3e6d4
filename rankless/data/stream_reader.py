"""Read a stream, an `IterableDataset`, batch by batch in its own order. Each rank keeps its own samples.

Note [the same stream on every rank]: a stream has no indices, so every rank iterates over all of it, in the order and
with the random numbers of a one-process `DataLoader`. Each rank collates only its own rows, so expensive work belongs
into `collate_fn`. This is right only if every rank reads the same samples, which a queue or a socket does not provide.
The ranks therefore compare a digest of each batch's samples. For a source that not every rank can read, use
reading="first".
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from rankless.data.batch_tree import compute_digest
from rankless.data.sample_reader import BatchRequest, Division, ReadFailure, SamplesRead, report_read_failure
from rankless.parallel.batch_division import BatchDivision


class StreamReader(IterableDataset[Any]):
    """The stream that the inner `DataLoader` sees. One item holds all samples of a batch.

    With `batch_size` None the stream yields whole batches.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None,
        drop_last: bool,
        batch_division: BatchDivision | None,
        is_probed: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.batch_division = batch_division
        """How the ranks divide batches if each collates its own rows; None if it collates all."""
        self.is_probed = is_probed
        """Whether a probe of the `collate_fn` decides for each batch; see Note [probed collation]."""

    def __iter__(self) -> Iterator[SamplesRead | ReadFailure]:
        # Not inside the generator below: DataLoader calls the user's __iter__ when iteration starts.
        return self._iterate_batches(iter(self.dataset))

    def _iterate_batches(self, stream: Iterator[Any]) -> Iterator[SamplesRead | ReadFailure]:
        position, batch_rows = 0, 1 if self.batch_size is None else self.batch_size
        while True:
            samples: list[Any] = []
            try:
                for sample in islice(stream, batch_rows):
                    samples.append(sample)
            except Exception as error:  # user code may raise anything; add the sample's number
                info = get_worker_info()
                reader = "" if info is None else f", in reader process {info.id} of {info.num_workers}"
                yield report_read_failure(error, f"sample {position + len(samples)} of the stream, from 0{reader}")
                return
            if not samples or (self.drop_last and len(samples) < batch_rows):
                return
            yield self._make_samples_read(samples, position)
            position += len(samples)
            if len(samples) < batch_rows:
                return

    def _make_samples_read(self, samples: list[Any], position: int) -> SamplesRead:
        digest = compute_digest(samples)
        if self.batch_size is None:
            whole = BatchRequest(indices=[position], rows=None, is_split=False, digest=digest)
            return SamplesRead(request=whole, batch=samples[0])
        rows = len(samples)
        indices: range = range(position, position + rows)
        is_split = self.batch_division is not None and self.batch_division.divides(rows)
        if is_split and self.batch_division is not None:
            rank, lengths = self.batch_division.own_part, self.batch_division.split(rows)
            if self.is_probed:
                division = Division(indices=indices, lengths=lengths, rank=rank, in_stream=True)
                probed = BatchRequest(indices=indices, rows=rows, is_split=False, digest=digest, division=division)
                return SamplesRead(request=probed, samples=samples)
            own = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
            samples, indices = samples[own], indices[own]
        request = BatchRequest(indices=indices, rows=rows, is_split=is_split, digest=digest)
        return SamplesRead(request=request, samples=samples)
