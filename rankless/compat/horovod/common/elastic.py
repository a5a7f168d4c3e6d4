"""Training that goes on when workers come and go: a state that can be committed and restored, and the loop around it.

Note [who sends the state]: whether the state is sent around after a round is not for one worker to say. In Horovod (its
issue #3494) those that had seen workers go left it out, while a worker that had come meanwhile waited for it, for ever.
Here each worker says in which way it left its round, and the driver tells all of the next one the same.
"""

import copy
import functools
import queue
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from rankless.compat.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from rankless.runtime.elastic_round import membership

NO_UPDATE, REMOVED, ADDED = 0, 1, 2
"""What happened to hosts, as Horovod numbers it; both together are 3."""


class State:
    """What a training goes on from. Subclasses say how it is saved, restored and sent around.

    `bcast_object` gives every rank rank 0's object, `get_rank` this process's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have these called after each reset, as to scale the learning rate by the new number of workers."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Begin anew with other workers: called after each reset."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Hosts have come or are to go; what comes later has a greater timestamp."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, to be restored if a worker fails, and see whether hosts have come or gone.

        Raises HostsUpdatedInterrupt if they have. All ranks commit at the same step.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 has been told that hosts have come or are to go."""
        before = latest = self._last_updated_timestamp
        update = NO_UPDATE
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                update |= change
        before, self._last_updated_timestamp, update = self._bcast_object((before, latest, update))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(update == REMOVED)

    def save(self) -> None:
        """Keep the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks rank 0's state."""
        raise NotImplementedError

    def reset(self) -> None:
        """Fit the state to the new workers."""


class ObjectState(State):
    """A state of plain Python objects, each an attribute under its keyword."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        """Keep copies of the attributes of now."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes as they were saved."""
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Give all ranks rank 0's attributes of now, and save them.

        Horovod sends those that were saved last, though it sends a model as it is now; after an interrupt without a
        commit the two do not belong together.
        """
        if not self._saved_state:
            return
        ObjectState.save(self)
        self._saved_state = self._bcast_object(self._saved_state)
        if self._rank() != 0:
            ObjectState.restore(self)


class _Notices(Protocol):
    def on_hosts_updated(self, timestamp: int, update_res: int) -> None: ...


class _Listening:
    """Hands a worker's notices on to its state."""

    def __init__(self, state: _Notices) -> None:
        self._state = state

    def on_hosts_changed(self, round: int, *, removed: bool, added: bool) -> None:
        # A round's second notice is greater than its first, and those of a later round greater than both.
        change = (REMOVED if removed else NO_UPDATE) | (ADDED if added else NO_UPDATE)
        self._state.on_hosts_updated(4 * round + change, change)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """`func`, called again after each reset until it comes to its end: with the state restored if a worker has failed,
    and as it was if hosts have come or gone.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        member = membership()
        listening = _Listening(state)
        if member is not None:
            member.add(listening)
        skip_sync = is_reset_due = False
        try:
            while True:
                try:
                    if is_reset_due:
                        skip_sync = _begin_anew(state, reset, listening, skip_sync)
                    if not skip_sync:
                        state.sync()
                    if member is not None:
                        member.synced()
                    return func(state, *args, **kwargs)
                except HorovodInternalError:
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                is_reset_due = True
        finally:
            if member is not None:
                member.remove(listening)

    return wrapper


def _begin_anew(state: State, reset: Callable[[], None], listening: _Listening, skip_sync: bool) -> bool:
    """Meet the others again; returns whether the state need not be sent around."""
    member = membership()
    if member is not None:
        member.remove(listening)
        member.keeps_state = skip_sync
    reset()
    state.on_reset()
    if member is None:
        return skip_sync
    member.add(listening)  # it hears again what this round's members were told before the state was reset
    return member.round is not None and not member.round.must_sync
