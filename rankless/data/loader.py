"""The loader: a one-process DataLoader's batches, in its order, of which each rank reads its own rows only."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rankless.context.once import require_not_in_once
from rankless.context.world import World, WorldSource
from rankless.data.batch_source import Source
from rankless.data.batches import make_logical
from rankless.data.loader_position import VERSION, Moment, Pass, require_same_loader, sampler_states
from rankless.data.logical_tensor import GatherNotice
from rankless.data.options import LoaderOptions, Reading, check_options
from rankless.data.prefetching import copied, copier_for
from rankless.data.reading import BatchRead
from rankless.data.sample_order import Order

__all__ = ["Loader", "LoaderOptions", "Reading"]


class Loader:
    """An iterable of whole batches, over and over: one pass is one epoch, and `len()` is its number of
    batches.

    On one worker it yields what DataLoader yields. On more, tensors are logical, unless a batch has fewer
    rows than there are workers: then every rank reads it whole. Raises DataError for options and data that
    cannot be.
    """

    def __init__(self, dataset: Any, *, options: LoaderOptions, world: WorldSource) -> None:
        check_options(dataset, options)
        self.dataset = dataset
        self.options = options
        self.epoch = 0
        """Passes begun so far."""
        self._world = world
        self._order = Order(dataset, options)
        self._source = Source(self._order)
        self._pass: Pass | None = None
        self._taken_up: Pass | None = None
        self._stream_state: Any = None
        self._notice: GatherNotice | None = None

    @property
    def position(self) -> int:
        """Batches handed out in the present pass, or in the one that is to be taken up; 0 between passes."""
        present = self._present()
        return 0 if present is None else present.position

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        world = self._world()
        self._prepare(world)
        current, self._taken_up = self._taken_up, None
        stream_state, self._stream_state = self._stream_state, None
        if current is None:
            current = Pass(
                number=self.epoch,
                seed=self._order.seed_of_pass(self.epoch),
                begun=Moment.now(self._order.held),
                sampler=sampler_states(self._order.samplers),
            )
            self.epoch += 1
        elif self._order.options.num_workers > 0 and current.seed is None and not self._order.streams:
            world.notify(
                "the rest of the interrupted epoch has the right samples in the right order; random numbers that they "
                'draw in reader processes are drawn anew (reading="split" gives the same ones)'
            )
        self._pass = current
        world.mesh.check_sync_point(f"pass {current.number + 1} of a loader of {type(self.dataset).__name__}")
        # Not inside the generator below: DataLoader draws its base seed when iteration begins.
        return self._hand_out(self._source.begin(current, world, stream_state=stream_state), current, world)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, as numbers, texts and tensors: load it into a loader made alike, on any number of
        workers, and the next pass goes on with the batch after the last one handed out.
        """
        present = self._present()
        return {
            "version": VERSION,
            "made_of": self._order.made_of(),
            "epoch": self.epoch,
            "pass": None if present is None else present.as_plain(),
            "order": self._order.state_dict(),
            "stream": self.dataset.state_dict() if self._order.knows_itself else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was called. Raises DataError if the loader is not made alike."""
        require_same_loader(state, self._order.made_of())
        self.epoch = state["epoch"]
        self._pass = None
        self._source = Source(self._order)
        self._taken_up = None if state["pass"] is None else Pass.from_plain(state["pass"])
        self._stream_state = state["stream"]
        between = self._taken_up is None
        self._order.load_state_dict(state["order"], between_passes=between or self._stream_state is not None)
        if between and self._stream_state is not None:
            self.dataset.load_state_dict(self._stream_state)
            self._stream_state = None

    def _present(self) -> Pass | None:
        present = self._taken_up or self._pass
        return None if present is None or present.over else present

    def _prepare(self, world: World) -> None:
        require_not_in_once(world, "a pass over a loader")
        if self._notice is not None:
            return
        self._notice = GatherNotice(world.notify, world=world)
        if self.options.pin_memory and not torch.accelerator.is_available():
            world.notify("pin_memory=True does nothing here: there is no accelerator to copy to")

    def _hand_out(self, reads: Iterator[BatchRead], current: Pass, world: World) -> Iterator[Any]:
        meter, turn = world.meter, world.passes.begin(batches=self._steps_left(current))
        epoch = meter.begin_epoch(steps=self._steps_left(current)) if meter is not None else None
        try:
            for read, batch in self._batches(reads, world):
                if meter is not None and epoch is not None:
                    meter.batch(epoch, rows=read.request.rows or 0)
                current.hand_out(read.request.digest)
                world.passes.hand_out(turn)
                yield batch
        except GeneratorExit:
            current.over = True  # the script has left its loop: the next pass is a new one
            raise
        current.over = True
        world.passes.end(turn)
        if meter is not None and epoch is not None:
            meter.end_epoch(epoch)

    def _batches(self, reads: Iterator[BatchRead], world: World) -> Iterator[tuple[BatchRead, Any]]:
        """Each batch as the script gets it, with what was read for it."""
        notice = self._notice
        assert notice is not None
        batches = ((read, make_logical(read, mesh=world.mesh, notice=notice)) for read in reads)
        if self.options.device is None:
            return batches
        device = torch.device(self.options.device)
        if device.type == world.mesh.device.type:
            device = world.mesh.device
        return copied(batches, copier=copier_for(device), ahead=self.options.num_workers > 0)

    def _steps_left(self, current: Pass) -> int | None:
        try:
            return max(0, len(self) - current.position)
        except TypeError:
            return None
