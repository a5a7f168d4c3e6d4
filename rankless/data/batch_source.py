"""Where a loader's batches come from on one rank: a DataLoader over requests or over a stream, or rank 0."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from rankless.context.world import World
from rankless.data.batches import gather_lists, lists_in, require_agreement
from rankless.data.collation import Collation
from rankless.data.first_rank import draw_alike, sent_by_the_first
from rankless.data.generators import drawn_between, process_states, restore_process
from rankless.data.loader_position import Moment, Pass, require_same_batches, restore_samplers
from rankless.data.reading import BatchRead, ReaderStart, ReadingFailure, SampleReader, has_plain_columns
from rankless.data.requests import RankBatches
from rankless.data.sample_order import Order
from rankless.data.streams import StreamReader
from rankless.parallel.mesh import Mesh

_INTEGERS_ONLY = (RandomSampler, SequentialSampler, WeightedRandomSampler)
"""Samplers whose indices are integers from 0, so that rows of tensors can be taken at once."""


class Source:
    """Begins passes. With persistent reader processes their DataLoader lives as long as this."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._options = order.options
        self._lasting: tuple[DataLoader[Any], RankBatches | None] | None = None

    def begin(self, current: Pass, world: World, *, stream_state: Any = None) -> Iterator[BatchRead]:
        """The batches of a pass as this rank reads them; iteration begins now, as a DataLoader's does.

        `stream_state` is that of a pass that is taken up, for streams which know where they are.
        """
        mesh, before = world.mesh, process_states()
        from_first = self._options.reading == "first" and mesh.size > 1
        batches: Iterator[Any] = iter(())
        if mesh.rank == 0 or not from_first:
            batches = self._read(current, mesh, stream_state)
        if current.taken_up:
            # What beginning draws, the interrupted run has drawn before its state was saved.
            restore_process(before)
        if not from_first:
            return self._agreed(batches, current, mesh)
        draw_alike(before, mesh=mesh)
        return sent_by_the_first(batches, mesh=mesh)

    def _read(self, current: Pass, mesh: Mesh, stream_state: Any) -> Iterator[Any]:
        order = self._order
        if current.taken_up and stream_state is not None:
            order.dataset.load_state_dict(stream_state)
        elif current.taken_up:
            restore_samplers(order.samplers, current.sampler)
            current.begun.come_back(order.held)
        loader, requests = self._lasting or self._made(mesh, number=current.number)
        if self._options.persistent_workers:
            self._lasting = (loader, requests)
        if requests is not None:
            requests.current = current
            return iter(loader)
        batches = iter(loader)
        if current.taken_up and current.first is not None and stream_state is None:
            current.first.come_back(order.held)
            require_same_batches(current, [_digest(read) for read in islice(batches, current.position)])
        return _noted(batches, current, order)

    def _made(self, mesh: Mesh, *, number: int) -> tuple["DataLoader[Any]", RankBatches | None]:
        order, options = self._order, self._options
        divided = mesh.size > 1 and options.reading == "split"
        requests: RankBatches | None = None
        reader: StreamReader | SampleReader
        if order.streams:
            part = (mesh.rank, mesh.size) if divided else None
            reader = StreamReader(order.dataset, batch_size=options.batch_size, drop_last=options.drop_last, part=part)
        else:
            requests = RankBatches(
                order.sampler, mesh=mesh, divided=divided, in_batches=order.makes_batches, held=order.held
            )
            columns = has_plain_columns(order.dataset) and options.collate_fn is None and order.makes_batches
            as_columns = columns and type(order.samplers[-1]) in _INTEGERS_ONLY
            reader = SampleReader(order.dataset, as_columns=as_columns, as_batches=not order.makes_batches)
        generator = order.generator
        if options.persistent_workers and number > 0:
            # Only the first pass draws a base seed for reader processes that last; this one takes up a later pass.
            generator = torch.Generator()
        loader: DataLoader[Any] = DataLoader(
            reader,
            batch_size=None,
            sampler=requests,
            num_workers=options.num_workers,
            collate_fn=Collation(options.collate_fn),  # type: ignore[arg-type]  # takes what our readers give
            pin_memory=options.pin_memory and torch.accelerator.is_available(),
            timeout=options.timeout,
            worker_init_fn=ReaderStart(options.worker_init_fn),
            multiprocessing_context=options.multiprocessing_context,
            generator=generator,
            prefetch_factor=options.prefetch_factor,
            persistent_workers=options.persistent_workers,
        )
        return loader, requests

    def _agreed(self, batches: Iterator[Any], current: Pass, mesh: Mesh) -> Iterator[BatchRead]:
        """The batches, once all ranks have the same; with their lists of plain values whole."""
        # A permutation that begins alike goes on alike; a user's sampler, collation or stream may part any time.
        always, agreeing = self._order.streams or self._options.makes_its_order, mesh.size > 1
        while True:
            read = _taken(batches)
            if agreeing:
                require_agreement(read, mesh=mesh)
            if isinstance(read, Exception):
                raise read
            if read is None:
                return
            if agreeing:
                current.has_lists = lists_in(read)
            if current.has_lists and read.request.divided:
                read = gather_lists(read, mesh=mesh)
            agreeing = mesh.size > 1 and always
            yield read


def _taken(batches: Iterator[Any]) -> BatchRead | Exception | None:
    """The next batch, what reading it raised, or None at the end."""
    try:
        read = next(batches, None)
    except Exception as error:  # foreign code; the other ranks hear of it before it goes on
        return error
    assert read is None or isinstance(read, BatchRead | ReadingFailure)
    return read.as_error() if isinstance(read, ReadingFailure) else read


def _noted(batches: Iterator[Any], current: Pass, order: Order) -> Iterator[Any]:
    """The batches; noted are the moment at which the first is asked for, and who draws from whose generator."""
    if current.first is None:
        current.first = Moment.now(order.held)
    if order.knows_itself:
        yield from batches
        return
    by_stream: frozenset[str] = frozenset()
    by_script: frozenset[str] = frozenset()
    before = after = process_states()
    for read in batches:
        by_script |= drawn_between(after, before)
        after = process_states()
        by_stream |= drawn_between(before, after)
        current.draws_late = by_stream & by_script
        yield read
        before = process_states()


def _digest(read: BatchRead | ReadingFailure) -> bytes:
    if isinstance(read, ReadingFailure):
        raise read.as_error()
    return read.request.digest
