"""The loader: batches of a one-process `DataLoader` in its order, of which each rank reads its own rows."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from rankless.context.world import World, WorldSource
from rankless.data.batch_agreement import make_logical
from rankless.data.batch_source import BatchSource
from rankless.data.loader_options import LoaderOptions, Reading, check_options
from rankless.data.loader_position import VERSION, GeneratorSnapshot, Pass, get_sampler_states, require_same_loader
from rankless.data.logical_tensor import GATHERS, GatherMonitor
from rankless.data.prefetching import PlainCopier, copy_to_device, look_ahead, make_copier
from rankless.data.sample_order import SampleOrder
from rankless.data.sample_reader import BatchRead
from rankless.data.tensors_on_cpu_ranks import SENDS, find_kinds_axis

Batch = TypeVar("Batch")

__all__ = ["Loader", "LoaderOptions", "Reading"]


class Loader(Generic[Batch]):
    """An iterable of whole batches. One pass over it is one epoch, and it may be iterated again and again.

    `rankless.loader` makes it. Use it as an annotation too: `rankless.Loader[tuple[Tensor, Tensor]]`. On one rank it
    yields what a `DataLoader` yields. On several ranks tensors are logical, and each rank holds its own rows; a batch
    of fewer samples than ranks is read by every rank as plain tensors.

    Attributes:
        dataset (Any): The data set.
        epoch (int): Number of passes that have begun.

    Example:
        >>> loader = rankless.loader(range(5), batch_size=2)
        >>> isinstance(loader, rankless.Loader)
        True
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self, dataset: Any, *, options: LoaderOptions, world: WorldSource, finish: Callable[[Any], Any] | None = None
    ) -> None:
        check_options(dataset, options)
        self._finish = finish
        """Makes of a batch what the script gets; None for the batch itself."""
        self.dataset = dataset
        self.options = options
        self.epoch = 0
        """Number of passes that have begun."""
        self.yielded = 0
        """Number of batches yielded in this process, in all passes."""
        self.before_step: Callable[[], None] = lambda: None
        """Called when the script asks for a batch that may exist, before anything of it is read or drawn."""
        self._world = world
        self._order = SampleOrder(dataset, options)
        self._source = BatchSource(self._order)
        self._pass: Pass | None = None
        self._resumed: Pass | None = None
        self._stream_state: Any = None
        self._monitor: GatherMonitor | None = None

    @property
    def position(self) -> int:
        """Number of batches yielded in this pass, or in the pass that will be resumed; 0 between passes.

        Example:
            >>> rankless.loader(range(5), batch_size=2).position
            0
        """
        present = self._active_pass()
        return 0 if present is None else present.position

    @property
    def finished_epochs(self) -> int:
        """Number of passes that are over: where a loop over epochs begins, also after `load_state_dict`.

        Example:
            >>> loader = rankless.loader(range(5), batch_size=2)
            >>> for epoch in range(loader.finished_epochs, 3):
            ...     batches = list(loader)
            >>> loader.finished_epochs
            3
        """
        return self.epoch - (self._active_pass() is not None)

    def __len__(self) -> int:
        """Return the number of batches in a pass.

        Raises:
            TypeError: The data set or its sampler has no length.

        Example:
            >>> len(rankless.loader(range(5), batch_size=2))
            3
        """
        return len(self._order)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, for example in a process of `rankless.spawn`: data, settings and number of passes.

        Readers and the position within a pass stay in this process. The first pass of the copy is a new one.
        """
        fresh = {"_source": BatchSource(self._order), "_pass": None, "_monitor": None, "before_step": lambda: None}
        return self.__dict__ | fresh

    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass, or resume the one of `load_state_dict`. Every rank must iterate.

        Raises:
            DataError: A sample cannot be read, or an interrupted pass cannot be resumed.
            RanksDiverged: Another rank makes another call.
            RanklessError: The call is inside `rankless.once`.

        Example:
            >>> [batch.tolist() for batch in rankless.loader(range(3), batch_size=2)]
            [[0, 1], [2]]
        """
        self._prepare(self._world())
        self.before_step()
        world = self._world()
        current, self._resumed = self._resumed, None
        stream_state, self._stream_state = self._stream_state, None
        if current is None:
            current = Pass(
                number=self.epoch,
                seed=self._order.derive_pass_seed(self.epoch),
                at_start=GeneratorSnapshot.now(self._order.generators),
                sampler=get_sampler_states(self._order.samplers),
            )
            self.epoch += 1
        elif self._order.options.num_workers > 0 and current.seed is None and not self._order.is_stream:
            world.notify(
                "the resumed epoch has the right samples in the right order, but its reader processes draw new random "
                'numbers; reading="split" repeats the same ones'
            )
        self._pass = current
        where = f"pass {current.number + 1} of a loader of {type(self.dataset).__name__}"
        world.run_for_all(lambda now: now.mesh.check_sync_point(where))
        world = world.of_last_operation
        # Not inside the generator below: DataLoader draws its base seed when iteration begins.
        source = self._source  # the script may load a position while this pass is in progress
        return self._yield_batches(source, source.begin(current, world, stream_state=stream_state), current, world)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader: which epoch, and which batch is next.

        Load it into a loader made with the same arguments, on any number of ranks. The next pass then begins with the
        batch after the last one yielded.

        Returns:
            Numbers, texts, lists, dicts and tensors.

        Raises:
            DataError: The sampler or stream cannot be resumed in the middle of a pass.

        Example:
            >>> loader = rankless.loader(range(5), batch_size=2)
            >>> batches = iter(loader)
            >>> next(batches).tolist()
            [0, 1]
            >>> state = loader.state_dict()
            >>> resumed = rankless.loader(range(5), batch_size=2)
            >>> resumed.load_state_dict(state)
            >>> [batch.tolist() for batch in resumed]
            [[2, 3], [4]]
        """
        present = self._active_pass()
        return {
            "version": VERSION,
            "made_of": self._order.settings(),
            "epoch": self.epoch,
            "pass": None if present is None else present.to_plain(),
            "order": self._order.state_dict(),
            "stream": self.dataset.state_dict() if self._order.stream_saves_state else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called.

        Args:
            state: What `state_dict` returned.

        Raises:
            DataError: The loader was made with other arguments, or the state is of another version.

        Example:
            >>> loader = rankless.loader(range(5), batch_size=2)
            >>> loader.load_state_dict(rankless.loader(range(5), batch_size=2).state_dict())
        """
        require_same_loader(state, self._order.settings())
        self.epoch = state["epoch"]
        self._pass = None
        self._source = BatchSource(self._order)
        self._resumed = None if state["pass"] is None else Pass.from_plain(state["pass"])
        self._stream_state = state["stream"]
        between = self._resumed is None
        self._order.load_state_dict(state["order"], between_passes=between or self._stream_state is not None)
        if between and self._stream_state is not None:
            self.dataset.load_state_dict(self._stream_state)
            self._stream_state = None

    def _active_pass(self) -> Pass | None:
        present = self._resumed or self._pass
        return None if present is None or present.is_over else present

    def _prepare(self, world: World) -> None:
        world.require_not_in_once("a pass over a loader")
        if self._monitor is not None:
            return
        effect = GATHERS if find_kinds_axis(world.mesh) is None else SENDS
        self._monitor = GatherMonitor(world.notify, world=world, effect=effect)
        if self.options.pin_memory and not torch.accelerator.is_available():
            world.notify("pin_memory=True has no effect: there is no accelerator")

    def _yield_batches(
        self, source: BatchSource, reads: Iterator[BatchRead], current: Pass, world: World
    ) -> Iterator[Any]:
        batches = self._count_steps_left(current)
        loader_pass = world.passes.begin(batches=batches)
        world.events.begin_pass(loader_pass, batches=batches)
        try:
            for read, batch in self._iterate_batches(source, reads, current, world):
                world.events.begin_batch(loader_pass, rows=read.request.rows or 0)
                current.count_batch(read.request.digest)
                world.passes.start_batch(loader_pass)
                self.yielded += 1
                yield batch if self._finish is None else self._finish(batch)
                if self._count_steps_left(current) != 0:
                    self.before_step()
        except GeneratorExit:
            current.is_over = True  # the script left its loop; the next pass is a new one
            raise
        current.is_over = True
        world.passes.end(loader_pass)
        world.joint.meet("the end of a pass over a loader")
        world.events.end_pass(loader_pass)

    def _iterate_batches(
        self, source: BatchSource, reads: Iterator[BatchRead], current: Pass, world: World
    ) -> Iterator[tuple[BatchRead, Any]]:
        """Yield each batch as the script gets it, with what was read for it."""
        device = None if self.options.device is None else torch.device(self.options.device)
        if device is not None and device.type == world.mesh.device.type:
            device = world.mesh.device
        is_shared = find_kinds_axis(world.mesh) is not None
        copier = None if device is None else PlainCopier(device) if is_shared else make_copier(device)
        batches: Iterator[tuple[BatchRead, Any]] = ((read, self._make_batch(source, read)) for read in reads)
        if copier is not None:
            batches = copy_to_device(batches, copier=copier, ahead=self.options.num_workers > 0)
        count = self._count_steps_left(current)
        if count is None or not world.joint.reads_early(world) or not source.may_read_early:
            return batches

        def read_again(read: BatchRead) -> Any:
            batch = self._make_batch(source, source.read_again(read.request))
            return batch if copier is None else copier.finish(copier.start(batch))

        if self.options.num_workers > 0:
            return look_ahead(batches, world.joint.upcoming, most=count, read_again=None)
        return look_ahead(batches, world.joint.upcoming, most=count - 1, read_again=read_again)

    def _make_batch(self, source: BatchSource, read: BatchRead) -> Any:
        """Return what a source has read as the script gets it."""
        assert self._monitor is not None
        return make_logical(read, mesh=source.mesh, monitor=self._monitor, read_whole=source.read_whole)

    def _count_steps_left(self, current: Pass) -> int | None:
        try:
            return max(0, len(self) - current.position)
        except TypeError:
            return None
