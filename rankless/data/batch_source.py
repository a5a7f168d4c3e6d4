"""Where a loader's batches come from on one rank: from a `DataLoader` of its own, or from rank 0.

Read a loader's batches with PyTorch's `DataLoader` alone, in the runs on one worker that `rankless verify` records.

Note [plain reading]: `verify` compares a run on N workers with a run on one. If both read their batches with the same
code, a fault of that code is in both, and no comparison finds it. The run on one worker therefore hands the user's
data set and collate function to `DataLoader` itself. Two things stay shared, because they define which samples are
meant: the order, which PyTorch's samplers draw, and with reading="split" the seed of each sample, which replaces
`DataLoader`'s random numbers on one device too. Streams and resumed passes keep the loader's own reader.

Read a stream, an `IterableDataset`, batch by batch in its own order. Each rank keeps its own samples.

Note [the same stream on every rank]: a stream has no indices, so every rank iterates over all of it, in the order and
with the random numbers of a one-process `DataLoader`. Each rank collates only its own rows, so expensive work belongs
into `collate_fn`. This is right only if every rank reads the same samples, which a queue or a socket does not provide.
The ranks therefore compare a digest of each batch's samples. For a source that not every rank can read, use
reading="first".
"""

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from rankless.context.world import World
from rankless.data.batch_agreement import gather_lists, has_per_sample_lists, require_same_batch
from rankless.data.batch_indices import ReadingDecision, RequestSampler, make_whole
from rankless.data.batch_tree import compute_digest
from rankless.data.batches_from_cpu_ranks import (
    RequestReader,
    is_heterogeneous,
    request_ahead,
    share_batches,
)
from rankless.data.batches_from_first_rank import distribute_from_first_rank, sync_generators
from rankless.data.collation_probe import describe_function
from rankless.data.loader_position import GeneratorSnapshot, Pass, require_same_batches, set_sampler_states
from rankless.data.probed_collation import Collation, refuse_random
from rankless.data.random_generators import (
    Generator,
    find_changed_generators,
    find_generators,
    get_process_states,
    preserve_generators,
    seed_generators,
    set_process_states,
)
from rankless.data.sample_order import SampleOrder
from rankless.data.sample_reader import (
    BatchRead,
    BatchRequest,
    Division,
    ProbeResult,
    ReaderInit,
    ReadFailure,
    SampleReader,
    SamplesRead,
    has_plain_columns,
    report_read_failure,
)
from rankless.data.tensors_on_cpu_ranks import find_kinds_axis
from rankless.parallel.batch_division import BatchDivision
from rankless.parallel.mesh import Mesh

DEFAULT_PREFETCH = 2
"""How many batches each reader process of a `DataLoader` has ahead by default."""
_INTEGERS_ONLY = (RandomSampler, SequentialSampler, WeightedRandomSampler)
"""Samplers that yield integers from 0. The reader can then index whole tensors with them."""


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


class BatchSource:
    """Reads the batches of each pass. Persistent reader processes live as long as this object."""

    def __init__(self, order: SampleOrder) -> None:
        self._order = order
        self._options = order.options
        self._persistent: tuple[DataLoader[Any] | PlainReader, RequestSampler | None] | None = None
        self._decision: ReadingDecision | None = None
        """Who reads what, for all passes; a probe of the `collate_fn` may change it."""
        self._collation = Collation(order.options.collate_fn)
        self._has_notified = False
        self.mesh = Mesh.solo()
        """The ranks between which batches are divided that are being read."""
        self._keeps_whole = False
        self._whole: tuple[BatchRequest, BatchRead] | None = None
        """The last batch that was read again."""

    def begin(self, current: Pass, world: World, *, stream_state: Any = None) -> Iterator[BatchRead]:
        """Start a pass and return its batches as this rank reads them.

        `stream_state` is the state of a stream that resumes an interrupted pass by itself. Iteration starts in
        this call, as in `DataLoader.__iter__`.
        """
        mesh, before = world.mesh, get_process_states()
        if mesh is not self.mesh:
            self._persistent = None  # of a process that has lost a rank since
        self.mesh, self._keeps_whole = mesh, world.recovery is not None and mesh.size > 1
        first_rank_reads = self._options.reading == "first" and mesh.size > 1
        batches: Iterator[Any] = iter(())
        requests: RequestSampler | None = None
        if mesh.rank == 0 or not first_rank_reads:
            plainly = world.events.compares_values and mesh.size == 1 and not self._order.is_stream
            batches, requests = self._read(current, mesh, stream_state, plainly=plainly and not current.resumed)
        if current.resumed:
            # The interrupted run had made the draws of iter() before it saved its state.
            set_process_states(before)
        if not first_rank_reads:
            agreed = self._check_agreement(batches, requests, current, world)
            return share_batches(agreed, world=world) if self._is_shared else agreed
        sync_generators(before, mesh=mesh)
        return distribute_from_first_rank(batches, mesh=mesh)

    def _read(
        self, current: Pass, mesh: Mesh, stream_state: Any, *, plainly: bool
    ) -> tuple[Iterator[Any], RequestSampler | None]:
        order, options = self._order, self._options
        if current.resumed and stream_state is not None:
            order.dataset.load_state_dict(stream_state)
        elif current.resumed:
            set_sampler_states(order.samplers, current.sampler)
            current.at_start.restore(order.generators)
        loader, requests = self._persistent or self._make_loader(mesh, current, plainly=plainly)
        if options.persistent_workers and not (self._is_shared and is_heterogeneous(mesh)):
            self._persistent = (loader, requests)
        if requests is not None:
            requests.current = current
            batches = iter(loader)
            if self._is_shared and is_heterogeneous(mesh):
                ahead = (options.prefetch_factor or DEFAULT_PREFETCH) * options.num_workers
                return request_ahead(batches, ahead), requests
            return batches, requests
        batches = iter(loader)
        if current.resumed and current.first is not None and stream_state is None:
            current.first.restore(order.generators)
            require_same_batches(current, [_get_digest(read) for read in islice(batches, current.position)])
        return _track_draws(batches, current, order), None

    @property
    def _is_shared(self) -> bool:
        """Whether workers on the CPU read for heterogeneous ones. Each worker reads a stream itself."""
        return find_kinds_axis(self.mesh) is not None and self._options.is_split and not self._order.is_stream

    def _make_loader(
        self, mesh: Mesh, current: Pass, *, plainly: bool
    ) -> tuple["DataLoader[Any] | PlainReader", RequestSampler | None]:
        order, options = self._order, self._options
        division = BatchDivision.of(mesh)
        # Every rank reads a whole stream anyway. Rows that it has collated need not be read again.
        is_split = division.count > 1 and options.is_split and not (order.is_stream and self._keeps_whole)
        if self._decision is None:
            is_probed = is_split and options.is_probed and order.collates_batches
            self._decision = ReadingDecision(
                is_split=None if is_probed else is_split,
                is_probed=is_probed,
                compares_ranks=mesh.size > 1 and options.reading != "first",
            )
        requests: RequestSampler | None = None
        reader: StreamReader | SampleReader
        if order.is_stream:
            reader = StreamReader(
                order.dataset,
                batch_size=options.batch_size,
                drop_last=options.drop_last,
                batch_division=division if is_split else None,
                is_probed=self._decision.is_probed,
            )
        else:
            requests = RequestSampler(
                order.sampler,
                mesh=mesh,
                decision=self._decision,
                in_batches=order.collates_batches,
                generators=order.generators,
                keeps_whole=self._keeps_whole,
            )
            if self._is_shared and is_heterogeneous(mesh):
                return self._make_request_loader(requests, current), requests
            if plainly:
                return self._make_plain_reader(requests, current), requests
            reader = self._make_sample_reader()
        return self._make_data_loader(reader, requests, self._get_process_options(current)), requests

    def _make_sample_reader(self) -> SampleReader:
        order = self._order
        return SampleReader(order.dataset, as_columns=self._reads_columns, as_batches=not order.collates_batches)

    @property
    def _reads_columns(self) -> bool:
        """Whether whole tensors are indexed to read a batch, which draws nothing."""
        order = self._order
        columns = has_plain_columns(order.dataset) and self._options.collate_fn is None and order.collates_batches
        return columns and type(order.samplers[-1]) in _INTEGERS_ONLY

    @property
    def _pins_memory(self) -> bool:
        return self._options.pin_memory and torch.accelerator.is_available()

    @property
    def may_read_early(self) -> bool:
        """Whether a batch may be read before the script asks for it; see Note [batches read twice]."""
        options = self._options
        if self._order.is_stream or options.has_custom_order or options.reading == "first":
            return False
        if find_kinds_axis(self.mesh) is not None:  # heterogeneous workers have no ids
            return False
        return options.num_workers > 0 or self._reads_columns

    def read_again(self, request: BatchRequest) -> BatchRead:
        """Return the same rows of a batch that has been read. Only for readers that draw nothing."""
        read = self._collation(self._make_sample_reader()[request])
        assert isinstance(read, BatchRead)
        return read.pin_memory() if self._pins_memory else read

    def _make_data_loader(
        self, reader: StreamReader | SampleReader, requests: Iterable[Any] | None, process_options: dict[str, Any]
    ) -> "DataLoader[Any]":
        return DataLoader(
            reader,
            batch_size=None,
            sampler=requests,
            collate_fn=self._collation,  # type: ignore[arg-type]  # takes what our readers return
            worker_init_fn=ReaderInit(self._options.worker_init_fn),
            **process_options,
        )

    def _make_request_loader(self, requests: RequestSampler, current: Pass) -> "DataLoader[Any]":
        """Return the loader of a heterogeneous worker. It draws as that of other workers does, and reads nothing."""
        generator = self._get_process_options(current)["generator"]
        return DataLoader(
            RequestReader(), batch_size=None, sampler=requests, collate_fn=_get_unchanged, generator=generator
        )

    def _make_plain_reader(self, requests: RequestSampler, current: Pass) -> PlainReader:
        """Return a `DataLoader` over the user's own data set; see Note [plain reading]."""
        order, options = self._order, self._options
        is_seeded = current.seed is not None
        keys = PlainKeys(requests, in_batches=order.collates_batches, is_seeded=is_seeded)
        order_options: dict[str, Any] = (
            {"batch_sampler": keys} if order.collates_batches else {"batch_size": None, "sampler": keys}
        )
        loader: DataLoader[Any] = DataLoader(
            SeededSamples(order.dataset) if is_seeded else order.dataset,
            collate_fn=options.collate_fn,
            worker_init_fn=ReaderInit(options.worker_init_fn) if is_seeded else options.worker_init_fn,
            **order_options,
            **self._get_process_options(current),
        )
        return PlainReader(loader, keys)

    def _get_process_options(self, current: Pass) -> dict[str, Any]:
        """Return the options of `DataLoader` for its reader processes and its base seed."""
        options, generator = self._options, self._order.generator
        if options.persistent_workers and current.number > 0:
            # DataLoader draws a base seed for persistent readers in the first pass only; this is a later pass.
            generator = torch.Generator()
        return {
            "num_workers": options.num_workers,
            "pin_memory": self._pins_memory,
            "timeout": options.timeout,
            "multiprocessing_context": options.multiprocessing_context,
            "generator": generator,
            "prefetch_factor": options.prefetch_factor,
            "persistent_workers": options.persistent_workers,
        }

    def _check_agreement(
        self, batches: Iterator[Any], requests: RequestSampler | None, current: Pass, world: World
    ) -> Iterator[BatchRead]:
        """Yield the batches after checking that all ranks have the same one, with lists gathered from all ranks."""
        # One check suffices for torch's samplers. A user's sampler, collation or stream may diverge at any batch.
        always = self._order.is_stream or self._options.has_custom_order
        reader = _FollowingReader(self, batches, requests, current)
        if world.recovery is not None and requests is not None:
            world.recovery.readers.add(reader)
        agreed_on: Mesh | None = None
        while True:
            reader.take_next(world.of_last_operation.mesh)
            agreeing = self.mesh.size > 1 and (always or self.mesh is not agreed_on)
            agreed_on = self.mesh
            found = world.run_for_all(reader.agree) if agreeing else ProbeResult()
            with world.operations.prepare(world.current.mesh):
                read = reader.get_read()
            if read is None:
                return
            if found.reason:
                self._notify_whole_reading(found, world)
            if requests is not None and self._decision is not None and self._decision.is_probed:
                must_restart = _follow_probe(read, found, requests, self._decision)
                if must_restart and found.is_random and self._options.num_workers > 0:
                    raise refuse_random(found.reason)
                if must_restart:
                    reader.batches = iter(self._restart_whole(requests, current))
                if read.request.is_split and found.reason:
                    continue  # it is read again, whole
            elif requests is not None and requests.keeps_whole:
                requests.pending.popleft()
            if agreeing:
                current.has_lists = has_per_sample_lists(read)
            if current.has_lists and read.request.is_split:
                read = world.run_for_all(functools.partial(self._gather_lists, read))
            yield read

    def _gather_lists(self, read: BatchRead, world: World) -> BatchRead:
        return gather_lists(read, mesh=world.mesh) if world.mesh is self.mesh else self.read_whole(read.request)

    def read_whole(self, request: BatchRequest) -> BatchRead:
        """Return a batch with all its rows, of which this rank had read some. It draws from no generator.

        Raises DataError if it cannot be read again.
        """
        if self._whole is None or self._whole[0] is not request:
            before = get_process_states()
            read = self._collation(self._make_sample_reader()[make_whole(request)])
            set_process_states(before)
            if isinstance(read, ReadFailure):
                raise read.as_error()
            self._whole = request, read
        return self._whole[1]

    def restart_divided(self, requests: RequestSampler, current: Pass, mesh: Mesh) -> "DataLoader[Any]":
        """Return a loader of the batches that have not been yielded, divided over another mesh."""
        self.mesh, self._persistent = mesh, None
        return self._restart(requests.iterate_again(mesh), current)

    def _notify_whole_reading(self, found: ProbeResult, world: World) -> None:
        if self._has_notified or self._options.collate_fn is None:
            return
        self._has_notified = True
        world.notify(
            f"collate_fn {describe_function(self._options.collate_fn)} needs the whole batch: {found.reason}. Every "
            'rank reads and collates all samples, as with reading="replicated"'
        )

    def _restart_whole(self, requests: RequestSampler, current: Pass) -> "DataLoader[Any]":
        """Return a loader of the whole batches that have not been yielded. It draws from no generator of the script."""
        return self._restart(requests.iterate_whole(), current)

    def _restart(self, requests: Iterable[Any], current: Pass) -> "DataLoader[Any]":
        process_options = self._get_process_options(current)
        process_options |= {"generator": torch.Generator(), "persistent_workers": False}
        return self._make_data_loader(self._make_sample_reader(), requests, process_options)


class _FollowingReader:
    """The batches of one pass as this rank reads them, also after another one was lost."""

    def __init__(
        self, source: BatchSource, batches: Iterator[Any], requests: RequestSampler | None, current: Pass
    ) -> None:
        self._source, self._requests, self._pass = source, requests, current
        self.batches = batches
        self.read: BatchRead | Exception | None = None
        """The last batch, the error that reading it raised, or None at the end."""

    def take_next(self, mesh: Mesh) -> BatchRead | Exception | None:
        """Read the next batch for the ranks of a mesh. If a rank was lost, that is the first one not yielded."""
        if self._must_restart(mesh) and self._requests is not None:
            self.batches = iter(self._source.restart_divided(self._requests, self._pass, mesh))
        self._source.mesh = mesh
        self.read = _take_next(self.batches)
        return self.read

    def stop(self) -> None:
        """End the reader processes: a later batch is of another mesh, and needs new ones."""
        if stop := getattr(self.batches, "_shutdown_workers", None):  # PyTorch does so at the end of an iterator
            stop()

    def _must_restart(self, mesh: Mesh) -> bool:
        """Return whether a rank was lost, and the others divide batches anew. Beside heterogeneous workers none do."""
        is_divided = self._requests is not None and find_kinds_axis(mesh) is None
        return mesh is not self._source.mesh and is_divided

    def agree(self, world: World) -> ProbeResult:
        """Require the same batch on all ranks. Return why they must read whole batches, if they must.

        Raises what reading has raised on this rank, or on another one.
        """
        if self._must_restart(world.mesh):
            self.take_next(world.mesh)
        found = require_same_batch(self.read, mesh=world.mesh)
        self.get_read()
        return found

    def get_read(self) -> BatchRead | None:
        """Return the last batch, or None at the end. Raise what reading has raised on this rank."""
        if isinstance(self.read, Exception):
            raise self.read
        return self.read


def _follow_probe(read: BatchRead, found: ProbeResult, requests: RequestSampler, decision: ReadingDecision) -> bool:
    """Decide who reads what from a batch and the ranks' result. Return whether batches must be read again, whole."""
    was_split = decision.is_split
    if not (found.reason and read.request.is_split):
        requests.pending.popleft()
    if found.reason:
        decision.is_split = False
    elif was_split is None and read.request.division is not None:
        decision.is_split = True
    return bool(found.reason) and any(request.is_split for request in requests.pending)


def _get_unchanged(read: Any) -> Any:
    return read


def _take_next(batches: Iterator[Any]) -> BatchRead | Exception | None:
    """Return the next batch, the error that reading it raised, or None at the end."""
    try:
        read = next(batches, None)
    except Exception as error:  # user code may raise anything; the caller reports it to the other ranks first
        return error
    assert read is None or isinstance(read, BatchRead | ReadFailure)
    return read.as_error() if isinstance(read, ReadFailure) else read


def _track_draws(batches: Iterator[Any], current: Pass, order: SampleOrder) -> Iterator[Any]:
    """Yield the batches and record random draws for a checkpoint.

    Records the generators' states when the first batch is requested. Records also which generators both the stream
    and the script draw from.
    """
    if current.first is None:
        current.first = GeneratorSnapshot.now(order.generators)
    if order.stream_saves_state:
        yield from batches
        return
    by_stream: frozenset[str] = frozenset()
    by_script: frozenset[str] = frozenset()
    before = after = get_process_states()
    for read in batches:
        by_script |= find_changed_generators(after, before)
        after = get_process_states()
        by_stream |= find_changed_generators(before, after)
        current.interleaved_draws = by_stream & by_script
        yield read
        before = get_process_states()


def _get_digest(read: BatchRead | ReadFailure) -> bytes:
    if isinstance(read, ReadFailure):
        raise read.as_error()
    return read.request.digest
